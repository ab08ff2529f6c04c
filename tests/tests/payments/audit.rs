//! Money that moved behind our back: the reaper reads the provider's lists and tells.

use std::time::Duration;

use anyhow::Result;
use semel_proto::provider::v1::payment_provider_client::PaymentProviderClient;
use semel_proto::provider::v1::{ChargeOrder, ChargeRequest, RefundRequest};
use semel_tests::client::Payment;
use semel_tests::payments::Ids;
use semel_tests::system::Env;
use semel_tests::wait::eventually;

use crate::support::{start, told};

/// A reading every second.
const OFTEN: Env<'static> = &[("SEMEL_REAPER_AUDIT_PERIOD", "1"), ("SEMEL_REAPER_PERIOD", "1")];

/// Far longer than a period, on a machine that is busy with much else.
const SOON: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
async fn a_charge_and_a_refund_behind_our_back_are_found_and_told_once() -> Result<()> {
    let system = start(1, OFTEN).await?;
    let control = system.place.control()?;
    let ours = Payment::new("ours", 1000);
    told(&system.client(0)?, &ours).await?;
    let orphans = async |of: &str| system.reaper.metric(&format!("semel_provider_orphan_{of}"), "").await;
    let readings =
        || async { Ok::<_, String>(control.calls().await.map_err(|error| error.to_string())?.list_refunds) };
    let read_again = async || {
        let before = readings().await.map_err(anyhow::Error::msg)?;
        let more = || async {
            // The first may have begun before.
            let after = readings().await?;
            if after >= before + 3 { Ok(()) } else { Err(format!("{before}, and now {after}")) }
        };
        eventually("the lists to be read again", SOON, more).await
    };
    read_again().await?;
    assert_eq!((orphans("charges").await?, orphans("refunds").await?), (0.0, 0.0), "all is ours");

    let mut provider = PaymentProviderClient::connect(format!("http://{}", system.place.provider)).await?;
    let order = ChargeOrder {
        amount: 700,
        currency: "EUR".to_owned(),
        source: "tok_visa".to_owned(),
        reference: "by hand".to_owned(),
    };
    provider.charge(ChargeRequest { key: "by-hand".to_owned(), order: Some(order), not_after: None }).await?;
    let charge_key = Ids::of(&ours.key)?.provider_key;
    let refund = RefundRequest { key: "by-hand".to_owned(), charge_key, amount: 300, not_after: None };
    provider.refund(refund).await?;
    let found = || async {
        let of = |of: &'static str| async move { orphans(of).await.map_err(|error| error.to_string()) };
        let found = (of("charges").await?, of("refunds").await?);
        if found == (1.0, 1.0) { Ok(()) } else { Err(format!("{found:?}")) }
    };
    eventually("both to be found", SOON, found).await?;
    read_again().await?;
    found().await.map_err(anyhow::Error::msg)?;
    for said in ["the provider has charged what", "the provider has given back what"] {
        let lines = system.reaper.daemon.lines();
        assert_eq!(lines.iter().filter(|line| line.contains(said)).count(), 1, "{said}: {lines:?}");
    }
    system.stop().await
}
