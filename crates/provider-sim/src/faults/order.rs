//! Reading an order for a fault: it must make sense for its call, so that no test waits for a fault that cannot happen.

use std::time::Duration;

use semel_proto::provider::v1::{Call, FaultKind, OrderFaultRequest};

use super::{Fault, Rule};
use crate::clock;

const LONGEST_DELAY: Duration = Duration::from_mins(10);
const LONGEST_NAME: usize = 64;
const LONGEST_KEY: usize = 255;

/// Reads an order.
///
/// # Errors
///
/// The first thing about it that makes no sense, for the caller to read.
pub(crate) fn read(order: OrderFaultRequest) -> Result<Rule, &'static str> {
    let kind = order.kind();
    let Ok(call) = Call::try_from(order.call) else { return Err("call is unknown") };
    if order.key.len() > LONGEST_KEY {
        return Err("key is longer than 255 bytes");
    }
    let delay = order.delay.as_ref().map(delay).transpose()?;
    let hold = name(order.hold, "hold is longer than 64 bytes")?;
    let code = name(order.code, "code is longer than 64 bytes")?;
    let of = |calls: &[Call]| calls.contains(&call);
    let fits = match kind {
        FaultKind::ApplyLate | FaultKind::InUse => of(&[Call::Charge, Call::Cancel, Call::Refund]),
        FaultKind::Decline => of(&[Call::Charge, Call::Refund]),
        FaultKind::WrongKey | FaultKind::WrongAmount => !of(&[Call::List, Call::ListRefunds]),
        _ => true,
    };
    if !fits {
        return Err("this kind cannot happen in this call");
    }
    let needed = "hold is missing";
    let fault = match kind {
        FaultKind::Unspecified => return Err("kind is missing or unknown"),
        FaultKind::AnswerLost => Fault::AnswerLost,
        FaultKind::AnswerUnavailable => Fault::AnswerUnavailable,
        FaultKind::Refuse => Fault::Refuse,
        FaultKind::ApplyLate if delay.is_none() && hold.is_none() => {
            return Err("delay and hold are missing");
        }
        FaultKind::ApplyLate => Fault::ApplyLate { delay, hold },
        FaultKind::Flapping => Fault::Flapping,
        FaultKind::Decline => Fault::Decline { code: code.ok_or("code is missing")? },
        FaultKind::Sticky500 => Fault::Sticky { applied: order.applied },
        FaultKind::InUse => Fault::InUse,
        FaultKind::HoldBeforeApply => Fault::HoldBefore { hold: hold.ok_or(needed)? },
        FaultKind::HoldAfterApply => Fault::HoldAfter { hold: hold.ok_or(needed)? },
        FaultKind::Garbage => Fault::Garbage,
        FaultKind::WrongKey => Fault::WrongKey,
        FaultKind::WrongAmount => Fault::WrongAmount,
        FaultKind::Outage => Fault::Outage,
        FaultKind::Latency => Fault::Latency { delay: delay.ok_or("delay is missing")? },
    };
    Ok(Rule {
        fault,
        call: (call != Call::Unspecified).then_some(call),
        key: (!order.key.is_empty()).then_some(order.key),
        left: (order.times > 0).then_some(order.times),
    })
}

fn delay(delay: &prost_types::Duration) -> Result<Duration, &'static str> {
    let delay = clock::duration(delay).and_then(|delay| Duration::try_from(delay).ok());
    delay.filter(|delay| *delay <= LONGEST_DELAY).ok_or("delay is not within 0 and 10 minutes")
}

fn name(name: String, too_long: &'static str) -> Result<Option<String>, &'static str> {
    if name.len() > LONGEST_NAME {
        return Err(too_long);
    }
    Ok((!name.is_empty()).then_some(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(kind: FaultKind, call: Call) -> OrderFaultRequest {
        OrderFaultRequest { kind: kind.into(), call: call.into(), ..OrderFaultRequest::default() }
    }

    #[test]
    fn reads_what_makes_sense() {
        let rule = read(OrderFaultRequest {
            key: "k".to_owned(),
            times: 2,
            hold: "h".to_owned(),
            ..order(FaultKind::HoldBeforeApply, Call::Cancel)
        });
        let fault = Fault::HoldBefore { hold: "h".to_owned() };
        let expected = Rule { fault, call: Some(Call::Cancel), key: Some("k".to_owned()), left: Some(2) };
        assert_eq!(rule, Ok(expected));
        let any = Rule { fault: Fault::Outage, call: None, key: None, left: None };
        assert_eq!(read(order(FaultKind::Outage, Call::Unspecified)), Ok(any));
    }

    #[test]
    fn refuses_what_cannot_happen() {
        for (order, why) in [
            (order(FaultKind::Unspecified, Call::Charge), "kind is missing or unknown"),
            (order(FaultKind::Decline, Call::Get), "this kind cannot happen in this call"),
            (order(FaultKind::ApplyLate, Call::Unspecified), "this kind cannot happen in this call"),
            (order(FaultKind::ApplyLate, Call::Charge), "delay and hold are missing"),
            (order(FaultKind::Decline, Call::Charge), "code is missing"),
            (order(FaultKind::HoldAfterApply, Call::Charge), "hold is missing"),
            (order(FaultKind::Latency, Call::Charge), "delay is missing"),
            (OrderFaultRequest { call: 99, ..order(FaultKind::Refuse, Call::Charge) }, "call is unknown"),
            (
                OrderFaultRequest { hold: "h".repeat(65), ..order(FaultKind::HoldAfterApply, Call::Charge) },
                "hold is longer than 64 bytes",
            ),
            (
                OrderFaultRequest {
                    delay: Some(prost_types::Duration { seconds: 601, nanos: 0 }),
                    ..order(FaultKind::Latency, Call::Charge)
                },
                "delay is not within 0 and 10 minutes",
            ),
        ] {
            assert_eq!(read(order), Err(why));
        }
    }
}
