use super::*;

fn rule(fault: Fault) -> Rule {
    Rule { fault, call: Some(Call::Charge), key: None, left: None }
}

fn met(plan: &mut Plan, key: &str) -> Vec<Fault> {
    plan.meet(Call::Charge, key).into_iter().map(|hit| hit.fault).collect()
}

#[test]
fn the_first_that_matches_acts_as_often_as_ordered() {
    let mut plan = Plan::default();
    plan.add(Rule { key: Some("other".to_owned()), ..rule(Fault::InUse) }).unwrap();
    plan.add(Rule { call: Some(Call::Get), ..rule(Fault::InUse) }).unwrap();
    plan.add(Rule { left: Some(2), ..rule(Fault::Refuse) }).unwrap();
    plan.add(rule(Fault::Garbage)).unwrap();
    assert_eq!(met(&mut plan, "k"), [Fault::Refuse]);
    assert_eq!(met(&mut plan, "k"), [Fault::Refuse]);
    assert_eq!(met(&mut plan, "k"), [Fault::Garbage]);
    assert_eq!(met(&mut plan, "other"), [Fault::InUse]);
}

#[test]
fn latencies_add_up_before_the_fault() {
    let mut plan = Plan::default();
    let latency = |ms| Fault::Latency { delay: Duration::from_millis(ms) };
    plan.add(rule(latency(1))).unwrap();
    plan.add(rule(Fault::Refuse)).unwrap();
    plan.add(Rule { left: Some(1), ..rule(latency(2)) }).unwrap();
    assert_eq!(met(&mut plan, "k"), [latency(1), latency(2), Fault::Refuse]);
    assert_eq!(met(&mut plan, "k"), [latency(1), Fault::Refuse]);
}

#[test]
fn flapping_refuses_every_second_call() {
    let mut plan = Plan::default();
    plan.add(Rule { left: Some(2), ..rule(Fault::Flapping) }).unwrap();
    let served: Vec<_> = (0..5).map(|_| met(&mut plan, "k").is_empty()).collect();
    assert_eq!(served, [false, true, false, true, true]);
}

#[test]
fn a_stuck_key_stays_stuck_and_applies_once_at_most() {
    let mut plan = Plan::default();
    let number = plan.add(Rule { left: Some(1), ..rule(Fault::Sticky { applied: true }) }).unwrap();
    assert_eq!(met(&mut plan, "k"), [Fault::Sticky { applied: true }]);
    for _ in 0..3 {
        let hit = Hit { number, fault: Fault::Sticky { applied: false } };
        assert_eq!(plan.meet(Call::Charge, "k"), [hit]);
    }
    assert_eq!(met(&mut plan, "free"), []);
    assert_eq!(plan.meet(Call::Get, "k"), [], "only the call that was stuck");
    plan.lift(Some(number));
    assert_eq!(met(&mut plan, "k"), []);
}

#[test]
fn an_outage_is_for_all_calls_until_it_is_lifted() {
    let mut plan = Plan::default();
    let number = plan.add(Rule { key: Some("k".to_owned()), ..rule(Fault::Outage) }).unwrap();
    for call in [Call::Charge, Call::Get, Call::List] {
        assert_eq!(plan.meet(call, ""), [Hit { number, fault: Fault::Outage }]);
    }
    plan.lift(None);
    assert_eq!(met(&mut plan, "k"), []);
}

#[test]
fn only_the_lifted_fault_is_gone_and_faults_are_bounded() {
    let mut plan = Plan::default();
    let first = plan.add(rule(Fault::Refuse)).unwrap();
    plan.add(rule(Fault::Garbage)).unwrap();
    plan.lift(Some(first));
    assert_eq!(met(&mut plan, "k"), [Fault::Garbage]);
    for _ in 1..MOST_FAULTS {
        plan.add(rule(Fault::Refuse)).unwrap();
    }
    assert_eq!(plan.add(rule(Fault::Refuse)), Err(TooMany));
}
