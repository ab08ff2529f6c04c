//! The routing key of an event, by a template that is checked at start.

use std::str::FromStr;

/// What AMQP holds, in bytes.
const LONGEST: usize = 255;

/// A template such as `{aggregate_type}.{event_type}`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RoutingKey {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Part {
    Text(String),
    AggregateType,
    EventType,
}

impl RoutingKey {
    /// The key of an event. One that is too long for AMQP is refused when it is published.
    pub(crate) fn of(&self, aggregate_type: &str, event_type: &str) -> String {
        let parts = self.parts.iter().map(|part| match part {
            Part::Text(text) => text.as_str(),
            Part::AggregateType => aggregate_type,
            Part::EventType => event_type,
        });
        parts.collect()
    }
}

impl Default for RoutingKey {
    fn default() -> Self {
        Self { parts: vec![Part::AggregateType, Part::Text(".".to_owned()), Part::EventType] }
    }
}

impl FromStr for RoutingKey {
    type Err = String;

    fn from_str(template: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = template;
        while !rest.is_empty() {
            let (text, behind) = rest.split_at(rest.find('{').unwrap_or(rest.len()));
            if text.chars().any(|char| char == '}' || char.is_control()) {
                return Err("a brace is closed that is not open, or a character cannot be printed".to_owned());
            }
            if !text.is_empty() {
                parts.push(Part::Text(text.to_owned()));
            }
            rest = match behind.strip_prefix('{').map(|name| name.split_once('}')) {
                None => break,
                Some(Some(("aggregate_type", rest))) => {
                    parts.push(Part::AggregateType);
                    rest
                }
                Some(Some(("event_type", rest))) => {
                    parts.push(Part::EventType);
                    rest
                }
                Some(_) => {
                    return Err("only {aggregate_type} and {event_type} may stand in braces".to_owned());
                }
            };
        }
        let key = Self { parts };
        match key.of("a", "e").len() {
            1..=LONGEST => Ok(key),
            _ => Err(format!("a routing key has 1 to {LONGEST} bytes")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_filled_with_the_events_types() {
        for (template, key) in [
            ("{aggregate_type}.{event_type}", "order.OrderPlaced"),
            ("shop.{event_type}", "shop.OrderPlaced"),
            ("{event_type}.v1", "OrderPlaced.v1"),
            ("all", "all"),
        ] {
            let template: RoutingKey = template.parse().unwrap();
            assert_eq!(template.of("order", "OrderPlaced"), key);
        }
        assert_eq!("{aggregate_type}.{event_type}".parse(), Ok(RoutingKey::default()));
    }

    #[test]
    fn a_template_that_cannot_be_meant_is_refused() {
        let long = "x".repeat(256);
        for bad in ["", "{aggregate}.{event_type}", "{event_type", "event_type}", "{}", "a\nb", long.as_str()]
        {
            assert!(bad.parse::<RoutingKey>().is_err(), "{bad:?}");
        }
    }
}
