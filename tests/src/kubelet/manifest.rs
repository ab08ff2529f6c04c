//! What is read of a manifest. Something that a pod has and that is not known here is an error, so that nothing is left out in
//! silence.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

/// A pod's template.
#[derive(Clone, Debug)]
pub(super) struct Template {
    pub(super) labels: BTreeMap<String, String>,
    /// Run before the container, one after the other.
    pub(super) init: Vec<Container>,
    pub(super) container: Container,
    /// The secrets that are mounted, by the volume's name.
    pub(super) volumes: Vec<Volume>,
    /// From the wish to end it to SIGKILL.
    pub(super) grace: Duration,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    pub(super) name: String,
    pub(super) image: String,
    #[serde(default)]
    pub(super) args: Vec<String>,
    pub(super) env: Vec<Variable>,
    #[serde(default)]
    ports: Vec<Port>,
    pub(super) volume_mounts: Vec<Mount>,
    pub(super) readiness_probe: Option<Probe>,
    pub(super) liveness_probe: Option<Probe>,
    lifecycle: Option<Value>,
    security_context: Value,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Variable {
    pub(super) name: String,
    pub(super) value: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Port {
    name: String,
    container_port: u16,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Mount {
    pub(super) name: String,
    pub(super) mount_path: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Volume {
    pub(super) name: String,
    pub(super) secret: SecretVolume,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct SecretVolume {
    pub(super) secret_name: String,
    /// The entries that are mounted; all of them if none is named.
    #[serde(default)]
    pub(super) items: Vec<Item>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Item {
    pub(super) key: String,
    pub(super) path: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Probe {
    pub(super) http_get: HttpGet,
    #[serde(default)]
    pub(super) initial_delay_seconds: u64,
    pub(super) period_seconds: u64,
    pub(super) timeout_seconds: u64,
    pub(super) failure_threshold: u32,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct HttpGet {
    pub(super) path: String,
    pub(super) port: String,
}

impl Template {
    pub(super) fn of(template: &Value) -> Result<Self> {
        let spec = &template["spec"];
        let containers: Vec<Container> = read(&spec["containers"])?;
        let [container] = containers.try_into().ok().context("a pod has one container")?;
        let init = spec.get("initContainers").map_or(Ok(Vec::new()), read)?;
        for container in init.iter().chain([&container]) {
            let security = &container.security_context;
            ensure!(
                security["runAsNonRoot"] == true
                    && security["readOnlyRootFilesystem"] == true
                    && security["allowPrivilegeEscalation"] == false
                    && security["capabilities"]["drop"][0] == "ALL",
                "{}: a security context that is not restricted: {security}",
                container.name
            );
        }
        Ok(Self {
            labels: read(&template["metadata"]["labels"])?,
            init,
            container,
            volumes: read(&spec["volumes"])?,
            grace: Duration::from_secs(spec["terminationGracePeriodSeconds"].as_u64().unwrap_or(30)),
        })
    }

    /// The number of a named port.
    pub(super) fn port(&self, name: &str) -> Result<u16> {
        let port = self.container.ports.iter().find(|port| port.name == name);
        Ok(port.with_context(|| format!("no port {name}"))?.container_port)
    }

    /// How long a pod sleeps before it is asked to stop.
    pub(super) fn sleep_before_stop(&self) -> Duration {
        let hooks = self.container.lifecycle.as_ref();
        let seconds = hooks.and_then(|hooks| hooks["preStop"]["sleep"]["seconds"].as_u64());
        Duration::from_secs(seconds.unwrap_or_default())
    }
}

impl Container {
    /// The program that the image is named after.
    pub(super) fn program(&self) -> Result<&str> {
        let image = self.image.rsplit('/').next().unwrap_or_default();
        image.split([':', '@']).next().context("an image without a name")
    }
}

/// Whether a selector takes these labels.
pub(super) fn selects(selector: &Value, labels: &BTreeMap<String, String>) -> bool {
    let wanted = selector.as_object().into_iter().flatten();
    wanted.into_iter().all(|(name, value)| labels.get(name).map(String::as_str) == value.as_str())
}

fn read<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T> {
    serde_json::from_value(value.clone()).with_context(|| format!("reading {value}"))
}
