//! Identities derived from their cause, so that a repeat makes the same ones.
//!
//! An id is the start of a SHA-256 over length-prefixed parts, shaped as a UUID of version 8 (RFC 9562). Nothing random,
//! no serial number that a restored database would issue twice, no secret that could be rotated.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::idempotency::Scope;

/// The deployment's name, part of every derived id: staging and production must differ.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Namespace(String);

impl Namespace {
    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A namespace that is not 1 to 63 characters of `a-z 0-9 - _ .`.
#[derive(Debug, thiserror::Error)]
#[error("a namespace is 1 to 63 characters of a-z, 0-9, '-', '_' and '.', such as \"production\"")]
pub struct InvalidNamespace;

impl FromStr for Namespace {
    type Err = InvalidNamespace;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_' | '.');
        if (1..=63).contains(&text.len()) && text.chars().all(allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidNamespace)
        }
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Derives the id of what `step` of the operation under this key makes.
#[must_use]
pub fn from_key(namespace: &Namespace, scope: &Scope, step: &str) -> Uuid {
    digest(&[
        b"key",
        namespace.0.as_bytes(),
        scope.client.as_str().as_bytes(),
        scope.operation.as_bytes(),
        scope.key.as_str().as_bytes(),
        step.as_bytes(),
    ])
}

/// Derives the id of what `step` of a consumer makes of an event.
#[must_use]
pub fn from_event(namespace: &Namespace, consumer: &str, cause: Uuid, step: &str) -> Uuid {
    digest(&[b"event", namespace.0.as_bytes(), consumer.as_bytes(), cause.as_bytes(), step.as_bytes()])
}

/// Derives the id under which something that `source` told of by itself is written down; `told` is its name for that.
#[must_use]
pub fn from_told(namespace: &Namespace, source: &str, told: &str) -> Uuid {
    digest(&[b"told", namespace.0.as_bytes(), source.as_bytes(), told.as_bytes()])
}

fn digest(parts: &[&[u8]]) -> Uuid {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    let hash = hasher.finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::{ClientId, IdempotencyKey};

    fn id(namespace: &str, client: &str, operation: &'static str, key: &str, step: &str) -> Uuid {
        let scope = Scope {
            client: client.parse::<ClientId>().unwrap(),
            operation,
            key: key.parse::<IdempotencyKey>().unwrap(),
        };
        from_key(&namespace.parse().unwrap(), &scope, step)
    }

    #[test]
    fn ids_stay_the_same_for_ever() {
        // A changed id would make a retry after an upgrade a second charge: this value never changes.
        assert_eq!(
            id("production", "acme", "orders.create", "k-1", "order").to_string(),
            "7669ba57-6f87-8323-be2b-8d82004be99e"
        );
    }

    #[test]
    fn every_part_counts_and_parts_do_not_run_together() {
        let ids = [
            id("a", "ab", "o", "k", "s"),
            id("b", "ab", "o", "k", "s"),
            id("a", "a", "bo", "k", "s"),
            id("a", "abo", "o", "k", "s"),
            id("a", "ab", "p", "k", "s"),
            id("a", "ab", "o", "k2", "s"),
            id("a", "ab", "o", "k", "t"),
        ];
        for (i, left) in ids.iter().enumerate() {
            assert!(ids[i + 1..].iter().all(|right| left != right), "{ids:?}");
        }
    }

    #[test]
    fn refuses_namespaces_that_read_alike() {
        for text in ["", "Prod", "prod env", "prod\n", &"x".repeat(64)] {
            assert!(text.parse::<Namespace>().is_err(), "{text:?}");
        }
    }
}
