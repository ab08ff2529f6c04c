//! The adapter itself, call by call: what localstripe says of states, what the layer says of keys, and faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use semel_payments::provider::stripe::StripeProvider;
use semel_payments::provider::{
    Answer, Charged, List, Listed, Prepared, Provider as _, StoredCharge, StoredRefund,
};
use semel_tests::stripe::{API_KEY, DECLINED, Fault, GOOD, Stripe};
use semel_tests::wait::eventually;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const AMOUNT: i64 = 1250;

fn provider(stripe: &Stripe) -> Result<StripeProvider> {
    Ok(StripeProvider::new(stripe.base().parse()?, &API_KEY.parse()?)?)
}

fn soon() -> SystemTime {
    SystemTime::now() + Duration::from_mins(1)
}

/// A charge that is not prepared.
fn charge(provider: &StripeProvider, key: &str, source: &str) -> StoredCharge {
    StoredCharge {
        key: key.to_owned(),
        request: provider.encode(AMOUNT, "EUR", source, "a payment"),
        amount: AMOUNT,
        currency: "EUR".to_owned(),
        reference: None,
    }
}

async fn prepared(provider: &StripeProvider, charge: &StoredCharge) -> Result<StoredCharge> {
    let prepared = provider.prepare(charge, soon()).await;
    let Prepared::Reference(reference) = prepared else { anyhow::bail!("{prepared:?}") };
    Ok(StoredCharge { reference: Some(reference), ..charge.clone() })
}

/// A charge that was prepared.
async fn ready(provider: &StripeProvider, key: &str, source: &str) -> Result<StoredCharge> {
    prepared(provider, &charge(provider, key, source)).await
}

async fn status(stripe: &Stripe, key: &str) -> Result<Vec<String>> {
    let intents = stripe.intents().await?;
    Ok(intents.into_iter().filter(|intent| intent.key == key).map(|intent| intent.status).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_charge_is_prepared_confirmed_looked_up_and_refunded() -> Result<()> {
    let stripe = Stripe::start().await?;
    let provider = provider(&stripe)?;
    let charge = charge(&provider, "k", GOOD);
    let once = prepared(&provider, &charge).await?;
    assert_eq!(status(&stripe, "k").await?, ["requires_confirmation"]);
    let open = provider.get(&once).await;
    assert!(matches!(open, Answer::Unknown { .. }), "{open:?}");
    let again = prepared(&provider, &charge).await?;
    assert_eq!(once.reference, again.reference, "the same key gave another intent");

    let reference = once.reference.clone().context("it is prepared")?;
    let succeeded = Answer::Succeeded { reference: reference.clone() };
    assert_eq!(provider.charge(&once, soon()).await, succeeded);
    assert_eq!(provider.charge(&once, soon()).await, succeeded, "sent again");
    assert_eq!(provider.get(&once).await, succeeded);
    let late = provider.cancel(&once).await;
    assert!(matches!(late, Answer::Unknown { .. }), "canceled after it succeeded: {late:?}");
    assert_eq!(stripe.charges("k").await?, 1);

    let charged = Charged { key: "k".to_owned(), reference };
    let refund = |key: &str, amount| StoredRefund {
        key: key.to_owned(),
        request: provider.encode_refund(&charged, amount),
        amount,
        currency: "EUR".to_owned(),
    };
    let (first, second) = (refund("r1", 400), refund("r2", 50));
    assert_eq!(provider.get_refund(&first).await, Answer::NotFound);
    let given = provider.refund(&first, soon()).await;
    assert!(matches!(given, Answer::Succeeded { .. }), "{given:?}");
    assert_eq!(provider.refund(&first, soon()).await, given, "sent again");
    assert_eq!(provider.get_refund(&first).await, given);
    assert_eq!(provider.get_refund(&second).await, Answer::NotFound);
    // What failed for good, and was done all the same, shows in the list.
    stripe.order("/v1/refunds", 1, Fault::FailApplied);
    let first_try = provider.refund(&second, soon()).await;
    assert!(matches!(first_try, Answer::Unknown { .. }), "{first_try:?}");
    let second_try = provider.refund(&second, soon()).await;
    assert!(matches!(second_try, Answer::Succeeded { .. }), "{second_try:?}");
    assert_eq!((stripe.refunds("r1").await?, stripe.refunds("r2").await?), (vec![400], vec![50]));

    let mut listed = Vec::new();
    for list in [List::Charges, List::Refunds] {
        let Listed::Page { moves, next: None } = provider.list(list, SystemTime::UNIX_EPOCH, None).await
        else {
            anyhow::bail!("no list of {list:?}");
        };
        assert!(moves.iter().all(|one| one.currency == "EUR"), "{moves:?}");
        listed.extend(moves.into_iter().map(|one| (one.key, one.amount)));
    }
    listed.sort();
    let expected = [("k", AMOUNT), ("r1", 400), ("r2", 50)].map(|(key, amount)| (key.to_owned(), amount));
    assert_eq!(listed, expected);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_declined_is_canceled_first_and_so_is_what_would_need_the_payer() -> Result<()> {
    let stripe = Stripe::start().await?;
    let provider = provider(&stripe)?;
    let authenticated = stripe.authenticated_card().await?;
    for (key, source, code) in
        [("d", DECLINED, "card_declined"), ("a", authenticated.as_str(), "authentication_required")]
    {
        let ready = ready(&provider, key, source).await?;
        let declined = Answer::Declined { reference: ready.reference.clone(), code: code.to_owned() };
        // Nothing is told while it could still be paid.
        stripe.order("/cancel", 1, Fault::Refuse);
        let open = provider.charge(&ready, soon()).await;
        assert!(matches!(open, Answer::Unknown { .. }), "{key}: {open:?}");
        assert_ne!(status(&stripe, key).await?, ["canceled"]);
        assert_eq!(provider.charge(&ready, soon()).await, declined, "{key}");
        assert_eq!(status(&stripe, key).await?, ["canceled"]);
        assert_eq!(provider.charge(&ready, soon()).await, declined, "{key}, sent again");
        assert_eq!(stripe.charges(key).await?, 0);
    }
    // Stripe tells of a card that is missing by a 400, and localstripe by a 404, of which nobody knows that it is about the card.
    let missing = charge(&provider, "m", "pm_nowhere");
    let by_404 = provider.prepare(&missing, soon()).await;
    assert!(matches!(by_404, Prepared::Answered(Answer::Unknown { .. })), "{by_404:?}");
    stripe.order("/v1/payment_intents", 1, Fault::Say(400, "invalid_request_error", "resource_missing"));
    let by_400 = provider.prepare(&missing, soon()).await;
    let code = "resource_missing".to_owned();
    assert_eq!(by_400, Prepared::Answered(Answer::Declined { reference: None, code }));
    assert!(status(&stripe, "m").await?.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_is_a_fence_whatever_arrives_later_and_by_whichever_key() -> Result<()> {
    let stripe = Stripe::start().await?;
    let provider = provider(&stripe)?;
    let late = ready(&provider, "late", GOOD).await?;
    stripe.order("/confirm", 1, Fault::HoldOnItsWay);
    let sender = provider.clone();
    let charge = late.clone();
    let sending = tokio::spawn(async move { sender.charge(&charge, soon()).await });
    stripe.has_held().await?;
    assert_eq!(provider.cancel(&late).await, Answer::Fenced);
    stripe.lift();
    assert_eq!(sending.await?, Answer::Fenced, "the late one");
    let again = provider.cancel(&late).await;
    assert!(matches!(again, Answer::Unknown { .. }), "a second cancel proves nothing: {again:?}");
    assert_eq!(provider.get(&late).await, Answer::Fenced);
    stripe.forget();
    assert_eq!(provider.charge(&late, soon()).await, Answer::Fenced, "past the horizon");
    assert_eq!(
        (stripe.charges("late").await?, status(&stripe, "late").await?),
        (0, vec!["canceled".to_owned()])
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_befalls_a_confirmation_the_same_again_charges_once() -> Result<()> {
    let stripe = Stripe::start().await?;
    let unknown = ["unknown"].as_slice();
    let rows: [(&str, Fault, &[&str]); 9] = [
        ("refused", Fault::Refuse, unknown),
        ("answer lost", Fault::DropAnswer, unknown),
        ("in use", Fault::Say(409, "idempotency_error", "idempotency_key_in_use"), &["in_progress"]),
        ("conflict", Fault::Say(409, "api_error", ""), &["not_executed"]),
        ("limited", Fault::Say(429, "invalid_request_error", "rate_limit"), &["not_executed"]),
        ("locked", Fault::Say(429, "invalid_request_error", "lock_timeout"), &["not_executed"]),
        ("unauthorised", Fault::Say(401, "invalid_request_error", ""), &["not_executed"]),
        ("bad gateway", Fault::Say(502, "api_error", ""), unknown),
        ("failed, applied", Fault::FailApplied, unknown),
    ];
    for (name, fault, first) in rows {
        // A breaker of its own.
        let provider = provider(&stripe)?;
        let ready = ready(&provider, name, GOOD).await?;
        stripe.order("/confirm", 1, fault);
        let answer = provider.charge(&ready, soon()).await;
        assert!(first.contains(&answer.label()), "{name}: {answer:?}");
        let answer = provider.charge(&ready, soon()).await;
        assert!(matches!(answer, Answer::Succeeded { .. }), "{name}: {answer:?}");
        stripe.forget();
        let answer = provider.charge(&ready, soon()).await;
        assert!(matches!(answer, Answer::Succeeded { .. }), "{name}, past the horizon: {answer:?}");
        assert_eq!(stripe.charges(name).await?, 1, "{name}");
    }
    Ok(())
}

/// It would be answered the same for a day: the intent tells that nothing was charged, and a fence ends it.
#[tokio::test(flavor = "multi_thread")]
async fn a_failure_that_is_kept_and_did_nothing_stays_unknown_until_it_is_fenced() -> Result<()> {
    let stripe = Stripe::start().await?;
    let provider = provider(&stripe)?;
    let ready = ready(&provider, "k", GOOD).await?;
    stripe.order("/confirm", 1, Fault::Fail);
    for _ in 0..3 {
        let answer = provider.charge(&ready, soon()).await;
        assert!(matches!(answer, Answer::Unknown { .. }), "{answer:?}");
    }
    assert_eq!(provider.cancel(&ready).await, Answer::Fenced);
    assert_eq!(stripe.charges("k").await?, 0);
    // The same of a creation: there is no intent, and never will be under this key.
    let other = charge(&provider, "other", GOOD);
    stripe.order("/v1/payment_intents", 1, Fault::FailApplied);
    let first = provider.prepare(&other, soon()).await;
    assert!(matches!(first, Prepared::Answered(Answer::Unknown { .. })), "{first:?}");
    let second = provider.prepare(&other, soon()).await;
    assert!(matches!(second, Prepared::Never { .. }), "{second:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn another_order_under_a_key_is_a_mismatch_and_a_closed_port_executes_nothing() -> Result<()> {
    let stripe = Stripe::start().await?;
    let provider = provider(&stripe)?;
    let first = charge(&provider, "k", GOOD);
    prepared(&provider, &first).await?;
    let mut other = first.clone();
    other.request = provider.encode(AMOUNT + 1, "EUR", GOOD, "a payment");
    let answer = provider.prepare(&other, soon()).await;
    assert!(matches!(answer, Prepared::Answered(Answer::Mismatch { .. })), "{answer:?}");

    let late = provider.charge(&prepared(&provider, &first).await?, SystemTime::UNIX_EPOCH).await;
    assert!(matches!(late, Answer::NotExecuted { .. }), "{late:?}");
    assert_eq!(stripe.charges("k").await?, 0);

    let nobody = format!("http://127.0.0.1:{}", semel_tests::net::free_port()?);
    let nobody = StripeProvider::new(nobody.parse()?, &API_KEY.parse()?)?;
    let answer = nobody.prepare(&first, soon()).await;
    assert!(matches!(answer, Prepared::Answered(Answer::NotExecuted { .. })), "{answer:?}");
    let silent = provider.clone().with_deadline(Duration::from_millis(300));
    stripe.order("/confirm", 1, Fault::HoldAnswer);
    let ready = prepared(&provider, &first).await?;
    let answer = silent.charge(&ready, soon()).await;
    assert!(matches!(answer, Answer::Unknown { .. }), "{answer:?}");
    stripe.lift();
    let answer = provider.charge(&ready, soon()).await;
    assert!(matches!(answer, Answer::Succeeded { .. }), "{answer:?}");
    Ok(())
}

/// Answers every request like this, or not at all if it is empty; returns its address, and how many there were.
async fn answering(head: &'static str, body: usize) -> Result<(String, Arc<AtomicUsize>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let base = format!("http://{}", listener.local_addr()?);
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 4096];
            if stream.read(&mut request).await.is_ok_and(|bytes| bytes > 0) {
                counted.fetch_add(1, Ordering::SeqCst);
                if head.is_empty() {
                    kept.push(stream);
                    continue;
                }
                // It may not listen to the end.
                let _ = stream.write_all(head.as_bytes()).await;
                let _ = stream.write_all(&vec![b' '; body]).await;
            }
        }
    });
    Ok((base, requests))
}

/// Sixty-four calls wait for their answers; what finds no place among them says nothing about Stripe.
#[tokio::test(flavor = "multi_thread")]
async fn too_many_calls_of_our_own_do_not_spare_stripe() -> Result<()> {
    let (base, requests) = answering("", 0).await?;
    let provider = StripeProvider::new(base.parse()?, &API_KEY.parse()?)?;
    let charge = charge(&provider, "k", GOOD);
    let mut under_way = JoinSet::new();
    for _ in 0..64 {
        let (provider, charge) = (provider.clone().with_deadline(Duration::from_mins(1)), charge.clone());
        under_way.spawn(async move { provider.prepare(&charge, soon()).await });
    }
    let all_sent = || async {
        let sent = requests.load(Ordering::SeqCst);
        if sent == 64 { Ok(()) } else { Err(sent) }
    };
    eventually("all calls to be sent", Duration::from_secs(20), all_sent).await?;
    let hasty = provider.clone().with_deadline(Duration::from_millis(20));
    for _ in 0..10 {
        let answer = hasty.prepare(&charge, soon()).await;
        let Prepared::Answered(Answer::NotExecuted { reason }) = answer else { anyhow::bail!("{answer:?}") };
        assert!(reason.contains("too many calls"), "{reason}");
    }
    assert!(provider.is_open(), "Stripe is spared for what is no fault of its own");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_is_not_followed_and_a_reply_beyond_all_bounds_is_unknown() -> Result<()> {
    let redirect =
        "HTTP/1.1 302 Found\r\nlocation: /v1/elsewhere\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let endless = "HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\nconnection: close\r\n\r\n";
    for (head, body) in [(redirect, 0), (endless, 3 * 1024 * 1024)] {
        let (base, requests) = answering(head, body).await?;
        let provider = StripeProvider::new(base.parse()?, &API_KEY.parse()?)?;
        let answer = provider.prepare(&charge(&provider, "k", GOOD), soon()).await;
        assert!(matches!(answer, Prepared::Answered(Answer::Unknown { .. })), "{answer:?}");
        assert_eq!(requests.load(Ordering::SeqCst), 1, "it was sent again");
    }
    Ok(())
}
