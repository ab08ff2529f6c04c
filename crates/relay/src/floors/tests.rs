use semel_core::outbox::drain::ServerRun;
use time::OffsetDateTime;

use super::*;

fn run(number: i64) -> ServerRun {
    ServerRun::since(OffsetDateTime::from_unix_timestamp(number).unwrap())
}

fn at(last: i64) -> Position {
    Position { run: run(1), last: Some(last) }
}

fn writers(open: &[&str]) -> Writers {
    let open: BTreeSet<String> = open.iter().map(|&transaction| transaction.to_owned()).collect();
    let prepared = open.iter().filter(|transaction| transaction.starts_with("-1/")).cloned().collect();
    Writers { run: run(1), open, prepared, logged: 100, flushed: 100 }
}

fn probed(heads: &[(i16, i64)]) -> Probed {
    let heads = heads.iter().map(|&(lane, id)| LaneHead { lane, id: Some(id) }).collect();
    Probed { run: run(1), read_only: false, heads }
}

/// One that has noted a position with these writers.
fn noted(last: i64, open: &[&str]) -> Keeper {
    let mut keeper = Keeper::new(Instant::now());
    assert!(keeper.came_to(at(last)));
    keeper.note(writers(open));
    keeper
}

fn floors(keeper: &Keeper) -> [i64; 2] {
    [keeper.floors().of(0), keeper.floors().of(1)]
}

#[test]
fn rise_to_the_oldest_event_and_past_the_position_where_there_is_none() {
    let mut keeper = noted(10, &[]);
    keeper.probed(&probed(&[(1, 4)]));
    assert_eq!(floors(&keeper), [11, 4]);
}

#[test]
fn do_not_rise_past_the_noted_position_though_an_event_behind_it_is_the_oldest() {
    // What is between the position and the event may still be on its way.
    let mut keeper = noted(10, &[]);
    keeper.probed(&probed(&[(0, 15)]));
    assert_eq!(floors(&keeper), [11, 11]);
}

#[test]
fn wait_for_every_writer_that_was_there_and_for_none_that_came_later() {
    let mut keeper = noted(10, &["3/7", "4/1"]);
    keeper.probed(&probed(&[]));
    assert_eq!(floors(&keeper), [0, 0]);
    keeper.settle(writers(&["4/1", "5/5"]));
    keeper.probed(&probed(&[]));
    assert_eq!(floors(&keeper), [0, 0]);
    keeper.settle(writers(&["3/8", "5/5"]));
    keeper.probed(&probed(&[]));
    assert_eq!(floors(&keeper), [11, 11]);
}

#[test]
fn wait_for_a_writer_that_is_prepared_meanwhile() {
    let mut keeper = noted(10, &["3/7"]);
    keeper.settle(writers(&["-1/7", "4/4"]));
    keeper.probed(&probed(&[]));
    assert_eq!(floors(&keeper), [0, 0], "it may be the one that was 3/7");
    // Those that are prepared from here on were not there.
    keeper.settle(writers(&["-1/4"]));
    keeper.probed(&probed(&[]));
    assert_eq!(floors(&keeper), [11, 11]);
}

#[test]
fn wait_until_the_log_is_safe() {
    let mut keeper = Keeper::new(Instant::now());
    keeper.came_to(at(10));
    keeper.note(Writers { logged: 200, flushed: 150, ..writers(&[]) });
    keeper.probed(&probed(&[]));
    assert_eq!(floors(&keeper), [0, 0]);
    keeper.settle(Writers { logged: 300, flushed: 200, ..writers(&[]) });
    keeper.probed(&probed(&[]));
    assert_eq!(floors(&keeper), [11, 11]);
}

#[test]
fn are_dropped_when_the_sequence_goes_back_or_the_server_is_another() {
    let risen = || {
        let mut keeper = noted(10, &[]);
        keeper.probed(&probed(&[]));
        assert_eq!(floors(&keeper), [11, 11]);
        keeper
    };
    let mut keeper = risen();
    keeper.came_to(at(9));
    assert_eq!(floors(&keeper), [0, 0]);
    let mut keeper = risen();
    keeper.came_to(Position { run: run(2), last: Some(20) });
    assert_eq!((floors(&keeper), keeper.floors().run()), ([0, 0], Some(run(2))));
    let mut keeper = risen();
    keeper.came_to(at(20));
    keeper.note(Writers { run: run(2), ..writers(&[]) });
    keeper.probed(&probed(&[]));
    assert_eq!(floors(&keeper), [0, 0]);
    let mut keeper = risen();
    keeper.came_to(Position { run: run(1), last: None });
    assert_eq!(floors(&keeper), [0, 0]);
}

#[test]
fn do_not_rise_by_what_another_server_says() {
    let mut keeper = noted(10, &[]);
    keeper.probed(&Probed { run: run(2), ..probed(&[]) });
    assert_eq!(floors(&keeper), [0, 0]);
}

#[test]
fn that_hid_an_event_are_told_and_dropped() {
    let mut keeper = noted(10, &[]);
    keeper.probed(&probed(&[(1, 4)]));
    assert_eq!(keeper.swept(&probed(&[(0, 11), (1, 4)])), []);
    assert_eq!(floors(&keeper), [11, 4]);
    assert_eq!(keeper.swept(&probed(&[(0, 11), (1, 3)])), [LaneHead { lane: 1, id: Some(3) }]);
    assert_eq!(floors(&keeper), [0, 0]);
}

#[test]
fn a_quiet_relay_rarely_asks() {
    let start = Instant::now();
    let mut keeper = Keeper::new(start);
    let mut asked = Vec::new();
    for tick in 0..200 {
        let now = start + Duration::from_millis(tick * 100);
        let look = keeper.look(now);
        if look == Look::Sequence {
            asked.push(tick);
            if keeper.came_to(at(10)) {
                keeper.note(writers(&[]));
            }
        }
        // Work, once.
        keeper.probed(&probed(if tick == 50 { &[(0, 12)] } else { &[] }));
    }
    assert_eq!(asked, [0, 51, 151]);
    assert!(!keeper.came_to(at(10)), "there is nothing to gain from asking who writes");
}
