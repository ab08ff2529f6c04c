use super::*;

const NOON: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;
const HOUR: Duration = Duration::HOUR;

fn ask(key: &str, amount: i64) -> ChargeAsk {
    let order = ChargeOrder {
        amount,
        currency: "EUR".to_owned(),
        source: "tok_visa".to_owned(),
        reference: "payment".to_owned(),
    };
    ChargeAsk { key: key.to_owned(), order, not_after: None }
}

fn from(key: &str, source: &str) -> ChargeAsk {
    let mut ask = ask(key, 10);
    ask.order.source = source.to_owned();
    ask
}

fn give_back(key: &str, charge_key: &str, amount: i64) -> RefundAsk {
    RefundAsk { key: key.to_owned(), charge_key: charge_key.to_owned(), amount, not_after: None }
}

fn charged(desk: &mut Desk, key: &str, amount: i64) -> Charge {
    desk.charge(&ask(key, amount), Manner::default(), NOON).unwrap().answer
}

fn refused<T>(result: Result<Done<T>, Refusal>) -> Option<Reason> {
    match result.err() {
        Some(Refusal::For(reason)) => Some(reason),
        _ => None,
    }
}

#[test]
fn the_same_order_has_the_same_answer_and_another_is_refused() {
    let mut desk = Desk::default();
    let first = charged(&mut desk, "k", 10);
    assert_eq!(
        (first.status(), first.amount, first.currency.as_str()),
        (charge::Status::Succeeded, 10, "EUR")
    );
    let again = desk.charge(&ask("k", 10), Manner::default(), NOON + HOUR).unwrap();
    assert_eq!(again, Done { answer: first, how: How::Known });
    assert_eq!(refused(desk.charge(&ask("k", 11), Manner::default(), NOON)), Some(Reason::KeyMismatch));
    assert_eq!(
        refused(desk.charge(&from("k", "tok_other"), Manner::default(), NOON)),
        Some(Reason::KeyMismatch)
    );
    assert_eq!(desk.unsaved().len(), 1);
}

#[test]
fn declines_by_source_and_by_order_and_remembers_it() {
    let mut desk = Desk::default();
    for (source, code) in [("tok_declined", "card_declined"), ("tok_insufficient", "insufficient_funds")] {
        let done = desk.charge(&from(code, source), Manner::default(), NOON).unwrap();
        assert_eq!(
            (done.answer.status(), done.answer.decline_code.as_str()),
            (charge::Status::Declined, code)
        );
    }
    let ordered = Manner { code: Some("stolen".to_owned()), ..Manner::default() };
    let first = desk.charge(&ask("k", 10), ordered, NOON).unwrap().answer;
    assert_eq!(first.decline_code, "stolen");
    assert_eq!(desk.charge(&ask("k", 10), Manner::default(), NOON).unwrap().answer, first);
    assert_eq!(refused(desk.cancel("k", NOON)), Some(Reason::AlreadyDeclined));
}

#[test]
fn a_fence_keeps_every_later_charge_out() {
    let mut desk = Desk::default();
    assert_eq!(desk.cancel("k", NOON).unwrap().answer.status(), charge::Status::Canceled);
    assert_eq!(refused(desk.charge(&ask("k", 10), Manner::default(), NOON)), Some(Reason::Fenced));
    assert_eq!(refused(desk.cancel("k", NOON)), Some(Reason::AlreadyCanceled));
    assert_eq!(desk.get("k", NOON).unwrap().answer.status(), charge::Status::Canceled);
    charged(&mut desk, "other", 10);
    assert_eq!(refused(desk.cancel("other", NOON)), Some(Reason::AlreadySucceeded));
}

#[test]
fn a_claimed_key_is_in_use_and_a_fence_does_not_wait_for_it() {
    let mut desk = Desk::default();
    let claimed = Manner { claimed: true, ..Manner::default() };
    assert!(desk.claim_charge(&ask("k", 10), NOON));
    assert!(!desk.claim_charge(&ask("k", 10), NOON));
    assert_eq!(refused(desk.charge(&ask("k", 10), Manner::default(), NOON)), Some(Reason::KeyInUse));
    let processing = desk.get("k", NOON).unwrap().answer;
    assert_eq!((processing.status(), processing.amount), (charge::Status::Processing, 10));
    desk.cancel("k", NOON).unwrap();
    assert_eq!(desk.get("k", NOON).unwrap().answer.status(), charge::Status::Canceled);
    assert_eq!(refused(desk.charge(&ask("k", 10), claimed.clone(), NOON)), Some(Reason::Fenced));

    assert!(desk.claim_charge(&ask("free", 10), NOON));
    desk.charge(&ask("free", 10), claimed, NOON).unwrap();
    assert_eq!(refused(desk.cancel("free", NOON)), Some(Reason::AlreadySucceeded));
}

#[test]
fn nothing_starts_after_its_time_but_an_answer_is_an_answer() {
    let mut desk = Desk::default();
    let late = ChargeAsk { not_after: Some(NOON), ..ask("k", 10) };
    let (soon, claimed) = (NOON + Duration::MILLISECOND, Manner { claimed: true, ..Manner::default() });
    assert_eq!(refused(desk.charge(&late, Manner::default(), soon)), Some(Reason::TooLate));
    assert!(!desk.claim_charge(&late, soon));
    assert_eq!(desk.get("k", soon), Err(Refusal::NotFound));
    // It came in in time, and was on its way since.
    let arrived = Manner { arrived: Some(NOON), ..Manner::default() };
    let first = desk.charge(&late, arrived, soon).unwrap().answer;
    assert_eq!(desk.charge(&late, Manner::default(), soon).unwrap().answer, first);
    // It started in time.
    let late = ChargeAsk { key: "claimed".to_owned(), ..late };
    assert!(desk.claim_charge(&late, NOON));
    assert!(desk.charge(&late, claimed, soon).is_ok());
}

#[test]
fn no_refund_starts_after_its_time_either() {
    let mut desk = Desk::default();
    charged(&mut desk, "k", 100);
    let late = RefundAsk { not_after: Some(NOON), ..give_back("r", "k", 60) };
    let soon = NOON + Duration::MILLISECOND;
    assert_eq!(refused(desk.refund(&late, Manner::default(), soon)), Some(Reason::TooLate));
    assert!(!desk.claim_refund(&late, soon));
    assert_eq!(desk.get_refund("r"), Err(Refusal::NotFound));
    let arrived = Manner { arrived: Some(NOON), ..Manner::default() };
    let first = desk.refund(&late, arrived, soon).unwrap().answer;
    assert_eq!(desk.refund(&late, Manner::default(), soon).unwrap().answer, first);
}

#[test]
fn refunds_are_idempotent_and_never_exceed_the_charge() {
    let mut desk = Desk::default();
    let plain = Manner::default;
    assert_eq!(
        refused(desk.refund(&give_back("r", "k", 1), plain(), NOON)),
        Some(Reason::ChargeNotSucceeded)
    );
    let charge = charged(&mut desk, "k", 100);
    let first = desk.refund(&give_back("r", "k", 60), plain(), NOON).unwrap().answer;
    assert_eq!((first.status(), first.currency.as_str()), (refund::Status::Succeeded, "EUR"));
    assert_eq!(desk.refund(&give_back("r", "k", 60), plain(), NOON).unwrap().answer, first);
    assert_eq!(refused(desk.refund(&give_back("r", "k", 59), plain(), NOON)), Some(Reason::KeyMismatch));
    assert_eq!(refused(desk.refund(&give_back("s", "k", 60), plain(), NOON)), Some(Reason::ExceedsCharge));
    desk.refund(&give_back("s", "k", 40), plain(), NOON).unwrap();
    assert_eq!(desk.get("k", NOON).unwrap().answer.refunded, 100);
    assert_eq!(desk.charge(&ask("k", 100), plain(), NOON).unwrap().answer, charge, "the first answer");

    desk.charge(&from("declined", "tok_declined"), plain(), NOON).unwrap();
    let of_declined = desk.refund(&give_back("t", "declined", 1), plain(), NOON);
    assert_eq!(refused(of_declined), Some(Reason::ChargeNotSucceeded));
}

#[test]
fn a_failed_refund_gives_nothing_back_and_is_remembered() {
    let mut desk = Desk::default();
    charged(&mut desk, "k", 100);
    let failing = Manner { code: Some("account_closed".to_owned()), ..Manner::default() };
    let first = desk.refund(&give_back("r", "k", 100), failing, NOON).unwrap().answer;
    assert_eq!((first.status(), first.failure_code.as_str()), (refund::Status::Failed, "account_closed"));
    assert_eq!(desk.get_refund("r").unwrap().answer, first);
    assert_eq!(desk.refund(&give_back("r", "k", 100), Manner::default(), NOON).unwrap().answer, first);
    desk.refund(&give_back("s", "k", 100), Manner::default(), NOON).unwrap();
}

#[test]
fn a_claimed_refund_is_processing() {
    let mut desk = Desk::default();
    charged(&mut desk, "k", 100);
    assert!(desk.claim_refund(&give_back("r", "k", 60), NOON));
    assert_eq!(desk.get_refund("r").unwrap().answer.status(), refund::Status::Processing);
    let other = desk.refund(&give_back("r", "k", 60), Manner::default(), NOON);
    assert_eq!(refused(other), Some(Reason::KeyInUse));
    let claimed = Manner { claimed: true, ..Manner::default() };
    desk.refund(&give_back("r", "k", 60), claimed, NOON).unwrap();
    assert_eq!(desk.get_refund("r").unwrap().answer.status(), refund::Status::Succeeded);
}

#[test]
fn a_key_past_the_horizon_is_forgotten() {
    let mut desk = Desk::new(&[], Some(24 * HOUR)).unwrap();
    let (inside, past) = (NOON + 24 * HOUR, NOON + 24 * HOUR + Duration::SECOND);
    let first = charged(&mut desk, "k", 100);
    desk.cancel("fenced", NOON).unwrap();
    desk.charge(&from("declined", "tok_declined"), Manner::default(), NOON).unwrap();
    desk.refund(&give_back("r", "k", 1), Manner::default(), NOON).unwrap();
    assert_eq!(desk.charge(&ask("k", 100), Manner::default(), inside).unwrap().answer, first);

    // What happened is not forgotten …
    assert_eq!(desk.get("k", past).unwrap().answer.reference, first.reference);
    assert_eq!(refused(desk.cancel("k", past)), Some(Reason::AlreadySucceeded));
    // … but the keys are.
    let second = desk.charge(&ask("k", 7), Manner::default(), past).unwrap().answer;
    assert_ne!(second.reference, first.reference);
    assert_eq!(desk.get("fenced", past), Err(Refusal::NotFound));
    desk.charge(&ask("fenced", 10), Manner::default(), past).unwrap();
    desk.refund(&give_back("r", "k", 1), Manner::default(), past).unwrap();
    desk.cancel("declined", past).unwrap();
    let listed: Vec<_> =
        desk.list(0, 100, None).answer.charges.into_iter().map(|charge| charge.key).collect();
    assert_eq!(listed, ["k", "declined", "k", "fenced"]);
}

#[test]
fn lists_by_page_and_time() {
    let mut desk = Desk::default();
    for hour in 0..5 {
        let key = hour.to_string();
        desk.charge(&ask(&key, 10), Manner::default(), NOON + hour * HOUR).unwrap();
        desk.cancel(&format!("fence-{hour}"), NOON).unwrap();
    }
    let keys = |page: &ListChargesResponse| {
        page.charges.iter().map(|charge| charge.key.clone()).collect::<Vec<_>>().join(" ")
    };
    let page = desk.list(0, 2, Some(NOON + HOUR)).answer;
    assert_eq!((keys(&page).as_str(), page.next_page_token.as_str()), ("1 2", "3"));
    let page = desk.list(3, 2, Some(NOON + HOUR)).answer;
    assert_eq!((keys(&page).as_str(), page.next_page_token.as_str()), ("3 4", ""));
    assert!(desk.list(usize::MAX, 2, None).answer.charges.is_empty());
}

#[test]
fn lists_refunds_by_their_own_time() {
    let mut desk = Desk::new(&[], Some(24 * HOUR)).unwrap();
    charged(&mut desk, "k", 100);
    for hour in 0..4 {
        let refund = give_back(&hour.to_string(), "k", 10);
        desk.refund(&refund, Manner::default(), NOON + hour * HOUR).unwrap();
    }
    let failing = Manner { code: Some("closed".to_owned()), ..Manner::default() };
    desk.refund(&give_back("failed", "k", 10), failing, NOON + 4 * HOUR).unwrap();
    // Its key is forgotten by then, so that it is made again.
    desk.refund(&give_back("0", "k", 10), Manner::default(), NOON + 25 * HOUR).unwrap();
    let keys = |page: &ListRefundsResponse| {
        page.refunds.iter().map(|refund| refund.key.clone()).collect::<Vec<_>>().join(" ")
    };
    let page = desk.list_refunds(0, 2, Some(NOON + HOUR)).answer;
    assert_eq!((keys(&page).as_str(), page.next_page_token.as_str()), ("1 2", "3"));
    let page = desk.list_refunds(3, 9, Some(NOON + HOUR)).answer;
    assert_eq!((keys(&page).as_str(), page.next_page_token.as_str()), ("3 failed 0", ""));
    assert_eq!(page.refunds[1].status(), refund::Status::Failed);
}

#[test]
fn what_is_undone_has_not_happened() {
    let mut desk = Desk::default();
    charged(&mut desk, "kept", 100);
    desk.keep();
    charged(&mut desk, "k", 10);
    desk.cancel("fenced", NOON).unwrap();
    desk.refund(&give_back("r", "kept", 60), Manner::default(), NOON).unwrap();
    desk.refund(&give_back("s", "kept", 40), Manner::default(), NOON).unwrap();
    assert!(desk.claim_charge(&ask("claimed", 10), NOON));
    assert_eq!(desk.unsaved().len(), 4);
    desk.undo();

    assert_eq!(desk.unsaved(), []);
    assert!(desk.list_refunds(0, 9, None).answer.refunds.is_empty());
    for key in ["k", "fenced", "claimed"] {
        assert_eq!(desk.get(key, NOON), Err(Refusal::NotFound), "{key}");
    }
    assert_eq!(desk.get_refund("r"), Err(Refusal::NotFound));
    assert_eq!(desk.get("kept", NOON).unwrap().answer.refunded, 0);
    desk.refund(&give_back("r", "kept", 100), Manner::default(), NOON).unwrap();
    assert_eq!(desk.unsaved()[0].seq, 2, "no number is left out");
}

#[test]
fn a_restart_knows_what_the_book_says() {
    let mut desk = Desk::default();
    let first = charged(&mut desk, "k", 100);
    desk.cancel("fenced", NOON).unwrap();
    desk.charge(&from("declined", "tok_declined"), Manner::default(), NOON).unwrap();
    desk.refund(&give_back("r", "k", 60), Manner::default(), NOON).unwrap();
    let failing = Manner { code: Some("closed".to_owned()), ..Manner::default() };
    desk.refund(&give_back("s", "k", 60), failing, NOON).unwrap_err();
    let failing = Manner { code: Some("closed".to_owned()), ..Manner::default() };
    desk.refund(&give_back("s", "k", 40), failing, NOON).unwrap();

    let entries = desk.unsaved().to_vec();
    assert!(entries.iter().all(|entry| !format!("{entry:?}").contains("tok_")), "a book holds no source");
    let mut again = Desk::new(&entries, None).unwrap();
    assert_eq!(again.charge(&ask("k", 100), Manner::default(), NOON).unwrap().answer, first);
    for key in ["k", "fenced", "declined"] {
        assert_eq!(again.get(key, NOON), desk.get(key, NOON), "{key}");
    }
    for key in ["r", "s"] {
        assert_eq!(again.get_refund(key), desk.get_refund(key), "{key}");
    }
    assert_eq!(again.list(0, 9, None), desk.list(0, 9, None));
    assert_eq!(again.list_refunds(0, 9, None), desk.list_refunds(0, 9, None));
    assert!(matches!(Desk::new(&entries[1..], None), Err(BookError::Order { seq: 2 })));
}
