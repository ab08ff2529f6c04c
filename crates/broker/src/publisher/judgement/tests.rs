//! The library's queue and the broker's order of frames are played here, in random interleavings.

use std::collections::VecDeque;

use super::*;

fn returned(id: &str) -> Return {
    Return { id: Some(id.into()), reason: "312 NO_ROUTE".into() }
}

fn nothing() -> Heard {
    Heard::Nothing { reason: "lost".into() }
}

fn back() -> Outcome {
    Outcome::Returned { reason: "312 NO_ROUTE".into() }
}

#[test]
fn a_return_belongs_to_its_id_and_not_to_its_confirm() {
    let judged = judge(
        &[Some("a"), Some("b"), Some("c")],
        vec![Heard::Ack(None), Heard::Ack(Some(returned("c"))), Heard::Ack(None)],
    );
    assert_eq!(judged.outcomes, [Outcome::Confirmed, Outcome::Confirmed, back()]);
    assert!(!judged.stray_return);
}

#[test]
fn a_nack_can_carry_another_messages_return() {
    let judged = judge(&[Some("a"), Some("b")], vec![Heard::Ack(None), Heard::Nack(Some(returned("a")))]);
    assert_eq!(judged.outcomes, [back(), Outcome::Nacked]);
}

#[test]
fn an_ack_with_a_foreign_return_is_not_believed_while_confirms_are_missing() {
    let judged = judge(
        &[Some("a"), Some("b"), Some("c")],
        vec![Heard::Ack(None), Heard::Ack(Some(returned("c"))), nothing()],
    );
    assert_eq!(judged.outcomes[0], Outcome::Confirmed);
    assert!(matches!(judged.outcomes[1], Outcome::Unknown { .. }));
    assert_eq!(judged.outcomes[2], back());
}

#[test]
fn messages_without_id_are_recognised_by_that() {
    let without_id = Return { id: None, reason: "312 NO_ROUTE".into() };
    let judged = judge(&[Some("a"), None], vec![Heard::Ack(Some(without_id)), Heard::Ack(None)]);
    assert_eq!(judged.outcomes, [Outcome::Confirmed, back()]);
}

#[test]
fn a_stray_return_discredits_every_confirm() {
    let judged = judge(
        &[Some("a"), Some("b"), Some("c")],
        vec![Heard::Ack(Some(returned("z"))), Heard::Ack(Some(returned("b"))), Heard::Nack(None)],
    );
    assert!(judged.stray_return);
    assert!(matches!(judged.outcomes[0], Outcome::Unknown { .. }));
    assert_eq!(judged.outcomes[1], back());
    assert_eq!(judged.outcomes[2], Outcome::Nacked);
}

/// Small generator of repeatable numbers (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).unwrap()
    }
}

/// Whatever the order of confirms, wherever returns stand before them, and wherever the connection
/// breaks off: an unroutable message is never called confirmed, and a routable one is never called
/// returned. If nothing breaks off, everything is known.
#[test]
fn no_unroutable_message_is_ever_confirmed() {
    for seed in 1..=20_000_u64 {
        let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let count = 1 + numbers.below(12);
        let unroutable: Vec<bool> = (0..count).map(|_| numbers.below(3) == 0).collect();
        let ids: Vec<String> = (0..count).map(|n| n.to_string()).collect();

        // The broker's frames: each return somewhere before its own confirm, confirms in any order.
        let mut frames: Vec<(bool, usize)> = Vec::new();
        for (message, unroutable) in unroutable.iter().enumerate() {
            let confirm = numbers.below(frames.len() + 1);
            frames.insert(confirm, (false, message));
            if *unroutable {
                frames.insert(numbers.below(confirm + 1), (true, message));
            }
        }
        let cut = if numbers.below(2) == 0 { frames.len() } else { numbers.below(frames.len() + 1) };

        // The library: a queue of returns, the oldest to the next confirm.
        let mut heard: Vec<Heard> = (0..count).map(|_| nothing()).collect();
        let mut waiting = VecDeque::new();
        for (is_return, message) in frames.iter().take(cut) {
            if *is_return {
                waiting.push_back(*message);
            } else {
                heard[*message] = Heard::Ack(waiting.pop_front().map(|message| returned(&ids[message])));
            }
        }

        let ids: Vec<_> = ids.iter().map(|id| Some(id.as_str())).collect();
        let judged = judge(&ids, heard);
        assert!(!judged.stray_return);
        for (unroutable, outcome) in unroutable.iter().zip(&judged.outcomes) {
            match outcome {
                Outcome::Confirmed => assert!(!unroutable, "seed {seed}: {frames:?} cut at {cut}"),
                Outcome::Returned { .. } => assert!(unroutable, "seed {seed}: {frames:?} cut at {cut}"),
                _ => assert!(cut < frames.len(), "seed {seed}: {outcome:?} although nothing was cut"),
            }
        }
    }
}
