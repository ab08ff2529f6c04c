//! Stripe, as a test has it: localstripe, which others wrote, behind a layer of ours.
//!
//! localstripe knows intents, their states and refunds, and no idempotency key. The layer adds what Stripe says of keys (the
//! first answer kept and replayed, another request under the key refused, one at work a conflict), and the faults that a
//! test orders. What it lets through it does not change, but for a filter of lists that localstripe refuses.
//!
//! What really happened is read from localstripe itself: [`Stripe::intents`].

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::net::{free_port, unique_name};
use crate::polyglot::python_packages;
use crate::process::Daemon;
use crate::provider::BookLine;
use crate::wait::eventually;

mod layer;

pub use layer::{Fault, Seen};

/// An API key that localstripe takes, and our daemons for one for tests.
pub const API_KEY: &str = "sk_test_semel";
/// A card that is charged.
pub const GOOD: &str = "pm_card_visa";
/// A card whose charges are declined.
pub const DECLINED: &str = "pm_card_chargeCustomerFail";
/// The number of a card whose holder would have to authenticate.
const AUTHENTICATED: &str = "4000002500003155";

/// How long localstripe may take to start.
const START: Duration = Duration::from_mins(1);

/// A running double; dropping it ends it.
#[derive(Debug)]
pub struct Stripe {
    /// Where its API is.
    pub address: SocketAddr,
    layer: Arc<layer::Layer>,
    client: reqwest::Client,
    localstripe: SocketAddr,
    _process: Daemon,
    _serving: tokio_util::task::AbortOnDropHandle<()>,
}

/// An intent, as localstripe has it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Intent {
    /// Its id.
    pub id: String,
    /// Where it stands.
    pub status: String,
    /// The key that it was asked for under.
    pub key: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code, in capital letters.
    pub currency: String,
}

impl Stripe {
    /// Installs localstripe where it is not, starts it with nothing in it, and the layer before it.
    ///
    /// # Errors
    ///
    /// It cannot be had, or does not start.
    pub async fn start() -> Result<Self> {
        let python = python_packages("stripe").await?.join("bin/python");
        let (port, name) = (free_port()?, unique_name("localstripe"));
        let process = Daemon::command(&name, python)
            .args(["-m", "localstripe", "--from-scratch", "--port", &port.to_string()])
            .env("PYTHONUTF8", "1")
            .start()
            .await?;
        let localstripe = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let client = reqwest::Client::builder().no_proxy().build()?;
        let (layer, address, serving) = layer::serve(localstripe, client.clone()).await?;
        let stripe = Self { address, layer, client, localstripe, _process: process, _serving: serving };
        eventually("localstripe to answer", START, || async {
            stripe.intents().await.map(drop).map_err(|error| format!("{error:#}"))
        })
        .await?;
        Ok(stripe)
    }

    /// Where its API is, as an option of our daemons.
    #[must_use]
    pub fn base(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Has the next such calls meet this fault: those whose path ends so, or that have this idempotency key.
    pub fn order(&self, call: &str, times: usize, fault: Fault) {
        self.layer.order(call, times, fault);
    }

    /// Lifts all faults; what they hold goes on.
    pub fn lift(&self) {
        self.layer.lift();
    }

    /// Forgets all idempotency keys, as Stripe does after a day.
    pub fn forget(&self) {
        self.layer.forget();
    }

    /// The calls so far, in order.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        self.layer.seen()
    }

    /// Waits until a fault holds a call.
    ///
    /// # Errors
    ///
    /// None comes, within a minute.
    pub async fn has_held(&self) -> Result<()> {
        let held = || async { if self.layer.held() > 0 { Ok(()) } else { Err("none") } };
        eventually("a call to be held", Duration::from_mins(1), held).await
    }

    /// Says whether no call is held or at work.
    #[must_use]
    pub fn held_none(&self) -> bool {
        self.layer.held() == 0 && self.layer.seen().iter().all(|seen| seen.is_over)
    }

    /// Makes a card whose holder would have to authenticate; returns its name.
    ///
    /// # Errors
    ///
    /// localstripe refuses.
    pub async fn authenticated_card(&self) -> Result<String> {
        let form = format!(
            "type=card&card[number]={AUTHENTICATED}&card[exp_month]=12&card[exp_year]=2030&card[cvc]=123"
        );
        let card = self.call(reqwest::Method::POST, "/v1/payment_methods", form).await?;
        Ok(card["id"].as_str().context("a card has a name")?.to_owned())
    }

    /// All intents that there are.
    ///
    /// # Errors
    ///
    /// localstripe does not answer.
    pub async fn intents(&self) -> Result<Vec<Intent>> {
        let list = self.call(reqwest::Method::GET, "/v1/payment_intents?limit=10000", String::new()).await?;
        let intents = list["data"].as_array().context("a list has data")?;
        intents.iter().map(intent).collect()
    }

    /// How many intents of this key have succeeded.
    ///
    /// # Errors
    ///
    /// localstripe does not answer.
    pub async fn charges(&self, key: &str) -> Result<usize> {
        let of_key = |intent: &&Intent| intent.key == key && intent.status == "succeeded";
        Ok(self.intents().await?.iter().filter(of_key).count())
    }

    /// How much money was given back under this key.
    ///
    /// # Errors
    ///
    /// localstripe does not answer.
    pub async fn refunds(&self, key: &str) -> Result<Vec<i64>> {
        let list = self.call(reqwest::Method::GET, "/v1/refunds?limit=10000", String::new()).await?;
        let refunds = list["data"].as_array().context("a list has data")?;
        let ours = refunds.iter().filter(|refund| refund["metadata"]["semel_key"] == key);
        Ok(ours.filter_map(|refund| refund["amount"].as_i64()).collect())
    }

    /// What has really happened, as lines of a provider's book.
    ///
    /// # Errors
    ///
    /// localstripe does not answer.
    pub async fn book(&self) -> Result<Vec<BookLine>> {
        let kind = |status: &str| match status {
            "succeeded" => Some("charge"),
            "canceled" => Some("fence"),
            _ => None,
        };
        let lines = self.intents().await?.into_iter().filter_map(|intent| {
            Some(BookLine {
                kind: kind(&intent.status)?.to_owned(),
                key: intent.key,
                reference: intent.id,
                amount: intent.amount,
                currency: intent.currency,
                charge_key: String::new(),
            })
        });
        Ok(lines.collect())
    }

    /// Asks localstripe itself.
    async fn call(&self, method: reqwest::Method, path: &str, form: String) -> Result<Value> {
        let url = format!("http://{}{path}", self.localstripe);
        let request = self
            .client
            .request(method, url)
            .bearer_auth(API_KEY)
            .header("content-type", "application/x-www-form-urlencoded")
            .body(form);
        let response = request.send().await?;
        let (status, body) = (response.status(), response.text().await?);
        ensure!(status.is_success(), "localstripe answered {path} with {status}: {body}");
        serde_json::from_str(&body).with_context(|| format!("reading {body}"))
    }
}

fn intent(value: &Value) -> Result<Intent> {
    let text = |value: &Value| value.as_str().map(str::to_owned).context("not a text");
    Ok(Intent {
        id: text(&value["id"])?,
        status: text(&value["status"])?,
        key: value["metadata"]["semel_key"].as_str().unwrap_or_default().to_owned(),
        amount: value["amount"].as_i64().context("an intent has an amount")?,
        currency: text(&value["currency"])?.to_ascii_uppercase(),
    })
}

/// Keys by which answers are kept.
type Kept = HashMap<String, layer::Entry>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
