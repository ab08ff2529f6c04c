//! W3C Trace Context: how a request's trace goes on, from its header to events and to the log of whoever handles them.
//!
//! <https://www.w3.org/TR/trace-context/>. Nothing is exported: a trace is found by its id in the log, and other tools may go
//! on from `traceparent`.

use std::fmt;
use std::str::FromStr;

/// The value of a `traceparent` header: a trace, and the span in it that something follows from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TraceContext {
    trace_id: u128,
    span_id: u64,
    flags: u8,
}

/// A text that is no `traceparent`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not a W3C traceparent")]
pub struct NoTraceContext;

impl TraceContext {
    /// A new span in the same trace, that follows from this one.
    #[must_use]
    pub fn child(self) -> Self {
        Self { span_id: fastrand::u64(1..), ..self }
    }

    /// The trace's id: 32 hexadecimal digits.
    #[must_use]
    pub fn trace_id(self) -> String {
        format!("{:032x}", self.trace_id)
    }

    /// The span's id: 16 hexadecimal digits.
    #[must_use]
    pub fn span_id(self) -> String {
        format!("{:016x}", self.span_id)
    }
}

impl FromStr for TraceContext {
    type Err = NoTraceContext;

    /// Reads any version that has these four parts, as the first one has.
    fn from_str(text: &str) -> Result<Self, NoTraceContext> {
        fn part<'a>(parts: &mut std::str::Split<'a, char>, digits: usize) -> Result<&'a str, NoTraceContext> {
            let part = parts.next().filter(|part| part.len() == digits).ok_or(NoTraceContext)?;
            let is_hex = part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            if is_hex { Ok(part) } else { Err(NoTraceContext) }
        }
        let mut parts = text.split('-');
        let version = part(&mut parts, 2)?;
        let trace_id = u128::from_str_radix(part(&mut parts, 32)?, 16).map_err(|_| NoTraceContext)?;
        let span_id = u64::from_str_radix(part(&mut parts, 16)?, 16).map_err(|_| NoTraceContext)?;
        let flags = u8::from_str_radix(part(&mut parts, 2)?, 16).map_err(|_| NoTraceContext)?;
        if parts.next().is_some() || version == "ff" || trace_id == 0 || span_id == 0 {
            return Err(NoTraceContext);
        }
        Ok(Self { trace_id, span_id, flags })
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-07ad6b7169203331-01";

    #[test]
    fn a_child_is_another_span_of_the_same_trace() {
        let parent: TraceContext = GOOD.parse().unwrap();
        assert_eq!(parent.to_string(), GOOD);
        let child = parent.child();
        assert_eq!((child.trace_id().as_str(), child.flags), ("0af7651916cd43dd8448eb211c80319c", 1));
        assert_eq!(parent.span_id(), "07ad6b7169203331");
        assert_ne!(child.span_id(), parent.span_id());
        assert_eq!(child.to_string().parse(), Ok(child));
    }

    #[test]
    fn a_malformed_one_is_none() {
        for text in [
            "",
            "00",
            &GOOD.to_uppercase(),
            &GOOD[1..],
            &GOOD.replace("00-", "ff-"),
            &GOOD.replace("0af7", "+af7"),
            &GOOD.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &GOOD.replace("07ad6b7169203331", &"0".repeat(16)),
            &format!("{GOOD}-extra"),
        ] {
            assert_eq!(text.parse::<TraceContext>(), Err(NoTraceContext), "{text}");
        }
    }
}
