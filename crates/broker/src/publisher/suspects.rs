//! Messages of which the broker refuses at least one, and closed the channel because of it.
//!
//! The first of these is found by halves: a half that lands holds none, in one that is refused there is one, and what is
//! refused alone is refused for its own sake. Nobody is blamed otherwise.

/// Messages that are suspected, in their order.
#[derive(Debug)]
pub(super) struct Suspects<M> {
    /// Those that are tried next.
    half: Vec<M>,
    /// Those that are suspected if that half lands.
    other: Vec<M>,
    /// Those behind a message that is refused.
    behind: Vec<M>,
}

impl<M> Suspects<M> {
    pub(super) fn new(all: Vec<M>) -> Self {
        let mut suspects = Self { half: Vec::new(), other: Vec::new(), behind: Vec::new() };
        suspects.suspect(all);
        suspects
    }

    fn suspect(&mut self, mut all: Vec<M>) {
        self.other = all.split_off(all.len().div_ceil(2));
        self.half = all;
    }

    /// Those that are to be sent now; empty when nobody is suspected any more.
    pub(super) fn half(&self) -> &[M] {
        &self.half
    }

    /// Takes in that the half was not refused.
    pub(super) fn landed(&mut self) {
        let other = std::mem::take(&mut self.other);
        self.suspect(other);
    }

    /// Takes in that the half was refused. What something was heard of, before or now, is not suspected any more.
    pub(super) fn refused(&mut self, is_unheard: impl Fn(&M) -> bool) {
        let mut half = std::mem::take(&mut self.half);
        let mut behind = std::mem::take(&mut self.other);
        behind.append(&mut self.behind);
        self.behind = behind;
        half.retain(is_unheard);
        self.suspect(half);
    }

    /// Those that were not sent again, as they are behind a message that is refused.
    pub(super) fn behind(self) -> Vec<M> {
        self.behind
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Finds the first refused one of so many messages; returns it, what is behind it, and the number of tries.
    fn find(messages: usize, refused: &[usize]) -> (Option<usize>, Vec<usize>, usize) {
        let mut suspects = Suspects::new((0..messages).collect());
        let (mut heard, mut found, mut tries) = (BTreeSet::new(), None, 0);
        while !suspects.half().is_empty() {
            tries += 1;
            let half = suspects.half().to_vec();
            if half.iter().any(|message| refused.contains(message)) {
                if let [alone] = half[..] {
                    found = Some(alone);
                    heard.insert(alone);
                }
                suspects.refused(|message| !heard.contains(message));
            } else {
                suspects.landed();
            }
        }
        (found, suspects.behind(), tries)
    }

    #[test]
    fn the_first_that_is_refused_is_found_in_as_many_tries_as_there_are_halves() {
        for messages in [1_usize, 2, 3, 10, 300] {
            let most = usize::try_from(messages.next_power_of_two().ilog2()).unwrap() + 1;
            for at in 0..messages {
                let (found, behind, tries) = find(messages, &[at, messages - 1]);
                assert_eq!(found, Some(at), "of {messages}");
                assert_eq!(behind, (at + 1..messages).collect::<Vec<_>>(), "in their order");
                assert!(tries <= most, "{tries} tries for number {at} of {messages}");
            }
        }
    }

    #[test]
    fn nobody_is_blamed_when_nothing_is_refused_any_more() {
        assert_eq!(find(300, &[]).0, None);
        assert_eq!(find(0, &[]), (None, vec![], 0));
    }

    #[test]
    fn what_was_heard_of_before_the_channel_closed_is_not_sent_again() {
        let mut suspects = Suspects::new(vec![1, 2, 3, 4]);
        suspects.refused(|&message| message != 1);
        assert_eq!(suspects.half(), [2]);
        assert_eq!(suspects.behind(), [3, 4]);
    }
}
