//! A small kubelet: runs what the chart renders, as processes, the way a cluster would.
//!
//! It renders the chart, and of the manifests it runs each Job to its end and each Deployment's pods: their programs with their
//! arguments, environment, mounted secrets and probes, and their end as they say it: out of the endpoints, the sleep before the
//! stop, SIGTERM, and SIGKILL after the grace. A rollout starts one new pod, waits until it is ready, and ends an old one.
//!
//! What it does not do is what needs a cluster: networks (each pod has an address of the loopback range, and a listener on all
//! addresses listens there), limits, policies, images. As root each program runs as the image's user, in a folder that holds what
//! the image would hold; the libraries of a program that is not linked statically are added.

mod manifest;
mod pod;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::process::Command;
use tokio::task::JoinHandle;

pub use pod::Pod;

use crate::net::unique_name;
use crate::workspace::{root, target_dir};
use manifest::{Template, selects};
use pod::End;

/// Names Helm's program; `cargo xtask test` sets it.
pub const HELM: &str = "SEMEL_HELM";

/// How long a pod may take until it is ready.
const READY: Duration = Duration::from_mins(1);
/// How long it takes until nobody sends anything to a pod that ends.
const ENDPOINTS_LAG: Duration = Duration::from_secs(1);
/// How often a pod of a Job is tried anew.
const JOB_TRIES: u32 = 5;

/// Secrets, by name and entry.
pub type Secrets = BTreeMap<String, BTreeMap<String, String>>;

/// A namespace of a cluster, with one release in it.
#[derive(Debug)]
pub struct Kubelet {
    manifests: Vec<Value>,
    secrets: Secrets,
    folder: PathBuf,
    /// The pods of each Deployment, the oldest first, those that end or have ended included.
    pods: Mutex<BTreeMap<String, Vec<Arc<Pod>>>>,
    /// Those that are ending, and then how they did.
    ending: Mutex<Vec<Ending>>,
}

type Ending = JoinHandle<Result<(String, End)>>;

impl Kubelet {
    /// Renders the chart with these values; none where there is no Helm.
    ///
    /// # Errors
    ///
    /// Helm refuses.
    pub async fn render(values: &Value, secrets: Secrets) -> Result<Option<Self>> {
        let Some(helm) = std::env::var_os(HELM).filter(|path| !path.is_empty()) else { return Ok(None) };
        let root = root()?;
        let folder = target_dir(&root).join("pods").join(unique_name("pods"));
        std::fs::create_dir_all(&folder)?;
        let file = folder.join("values.json");
        std::fs::write(&file, values.to_string())?;
        let mut command = Command::new(helm);
        command.args(["template", "semel"]).arg(root.join("deploy/helm/semel")).arg("--values").arg(file);
        let output = command.output().await.context("starting helm")?;
        ensure!(output.status.success(), "helm: {}", String::from_utf8_lossy(&output.stderr));
        let manifests: Vec<Value> = serde_saphyr::from_multiple(std::str::from_utf8(&output.stdout)?)?;
        let (pods, ending) = Default::default();
        Ok(Some(Self { manifests, secrets, folder, pods, ending }))
    }

    fn of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.manifests.iter().filter(move |manifest| manifest["kind"] == kind)
    }

    /// The names of the Deployments.
    #[must_use]
    pub fn deployments(&self) -> Vec<String> {
        let names =
            self.of_kind("Deployment").map(|one| one["metadata"]["name"].as_str().unwrap_or_default());
        names.map(str::to_owned).collect()
    }

    /// Runs every Job whose component is this to its end; returns what their programs said.
    ///
    /// # Errors
    ///
    /// One fails again and again.
    pub async fn run_jobs(&self, component: &str) -> Result<Vec<String>> {
        let mut said = Vec::new();
        for job in self.of_kind("Job") {
            if job["metadata"]["labels"]["app.kubernetes.io/component"] != component {
                continue;
            }
            let template = Template::of(&job["spec"]["template"])?;
            let name = job["metadata"]["name"].as_str().context("a Job without a name")?;
            let mut tries = 0;
            loop {
                tries += 1;
                match pod::run_to_end(name, &template, &self.secrets, &self.folder).await {
                    Ok(lines) => break said.extend(lines),
                    Err(error) if tries == JOB_TRIES => return Err(error.context(format!("the Job {name}"))),
                    Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
                }
            }
        }
        Ok(said)
    }

    /// Starts a Deployment's pods, as many as it says, and waits until they are ready.
    ///
    /// # Errors
    ///
    /// One is not.
    pub async fn deploy(&self, deployment: &str) -> Result<()> {
        let replicas = self.deployment(deployment)?["spec"]["replicas"].as_u64().unwrap_or(1);
        self.scale(deployment, usize::try_from(replicas)?).await
    }

    /// Brings a Deployment to this number of pods; those that go are ended behind our back.
    ///
    /// # Errors
    ///
    /// A new one is not ready in time.
    pub async fn scale(&self, deployment: &str, replicas: usize) -> Result<()> {
        let started = self.pods_of(deployment).len();
        let mut new = Vec::new();
        for _ in started..replicas {
            new.push(self.start(deployment).await?);
        }
        for pod in new {
            pod.ready(READY).await?;
        }
        for pod in self.pods_of(deployment).into_iter().skip(replicas) {
            self.end(&pod);
        }
        Ok(())
    }

    /// Replaces every pod of a Deployment, one after the other.
    ///
    /// # Errors
    ///
    /// A new one is not ready in time.
    pub async fn restart(&self, deployment: &str) -> Result<()> {
        let strategy = &self.deployment(deployment)?["spec"]["strategy"]["rollingUpdate"];
        ensure!(strategy["maxSurge"] == 1 && strategy["maxUnavailable"] == 0, "another strategy: {strategy}");
        for old in self.pods_of(deployment) {
            self.start(deployment).await?.ready(READY).await?;
            self.end(&old);
        }
        Ok(())
    }

    /// The addresses of those pods behind a Service that are ready and do not end.
    ///
    /// # Errors
    ///
    /// There is no such Service.
    pub fn endpoints(&self, service: &str) -> Result<Vec<String>> {
        let service = self.of_kind("Service").find(|one| one["metadata"]["name"] == service);
        let spec = &service.context("no such Service")?["spec"];
        let port = spec["ports"][0]["targetPort"].as_str().context("no port")?;
        let mut addresses = Vec::new();
        for deployment in self.deployments() {
            let template = Template::of(&self.deployment(&deployment)?["spec"]["template"])?;
            if selects(&spec["selector"], &template.labels) {
                let port = template.port(port)?;
                let ready =
                    self.all_pods_of(&deployment).into_iter().filter(|pod| pod.is_served(ENDPOINTS_LAG));
                addresses.extend(ready.map(|pod| format!("{}:{port}", pod.address())));
            }
        }
        Ok(addresses)
    }

    /// Where the pods of a Deployment that do not end have this port.
    ///
    /// # Errors
    ///
    /// There is no such Deployment, or no such port.
    pub fn addresses(&self, deployment: &str, port: &str) -> Result<Vec<String>> {
        let port = Template::of(&self.deployment(deployment)?["spec"]["template"])?.port(port)?;
        Ok(self.pods_of(deployment).iter().map(|pod| format!("{}:{port}", pod.address())).collect())
    }

    /// Ends every pod, and checks that each left by itself within its grace, with exit code 0, and that none was restarted for
    /// standing still.
    ///
    /// # Errors
    ///
    /// One did not.
    pub async fn end_all(&self) -> Result<usize> {
        for deployment in self.deployments() {
            self.scale(&deployment, 0).await?;
        }
        let ending = std::mem::take(&mut *self.ending.lock().unwrap_or_else(PoisonError::into_inner));
        let count = ending.len();
        for end in ending {
            let (name, end) = end.await??;
            ensure!(end == End::Clean, "{name}: {end:?}");
        }
        Ok(count)
    }

    fn deployment(&self, name: &str) -> Result<&Value> {
        let found = self.of_kind("Deployment").find(|one| one["metadata"]["name"] == name);
        found.with_context(|| format!("no Deployment {name}"))
    }

    fn pods_of(&self, deployment: &str) -> Vec<Arc<Pod>> {
        self.all_pods_of(deployment).into_iter().filter(|pod| !pod.leaves()).collect()
    }

    fn all_pods_of(&self, deployment: &str) -> Vec<Arc<Pod>> {
        let pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        pods.get(deployment).cloned().unwrap_or_default()
    }

    async fn start(&self, deployment: &str) -> Result<Arc<Pod>> {
        let template = Template::of(&self.deployment(deployment)?["spec"]["template"])?;
        let pod = Arc::new(Pod::start(deployment, &template, &self.secrets, &self.folder).await?);
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        pods.entry(deployment.to_owned()).or_default().push(Arc::clone(&pod));
        Ok(pod)
    }

    fn end(&self, pod: &Arc<Pod>) {
        pod.leave();
        let pod = Arc::clone(pod);
        let task = tokio::spawn(async move { Ok((pod.name().to_owned(), pod.end().await?)) });
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).push(task);
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
