//! Idempotency keys: one execution per key, the same answer to every repeat.
//!
//! Promise: of all requests under one key of one client and operation, at most one takes effect; every later one is
//! answered from what that one stored, byte for byte. A request with another intent under the key changes nothing.
//!
//! How: the key is a row whose primary key is its scope. [`engine::run`] looks it up, and otherwise has the operation
//! write it together with its effect in one transaction; a concurrent duplicate waits for that row. A row that is claimed
//! before an outside effect ([`store::claim`]) carries a lease and a fence.
//!
//! It does not authenticate or parse; that is the edge's work. What new executions a client may begin is bounded by
//! [`admission`]. In a crash, the transaction decides: either the
//! effect, its event and the completed key are there, or none of them.

pub mod admission;
pub mod engine;
pub mod person;
pub mod store;

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The account that owns keys and resources: 1 to 63 characters of `a-z 0-9 - _`, the first a letter or digit.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct ClientId(String);

impl ClientId {
    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A client's name that cannot be one.
#[derive(Debug, thiserror::Error)]
#[error("a client is 1 to 63 characters of a-z, 0-9, '-' and '_', the first a letter or digit")]
pub struct InvalidClientId;

impl FromStr for ClientId {
    type Err = InvalidClientId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_');
        let starts_well = text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
        if (1..=63).contains(&text.len()) && starts_well && text.chars().all(allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidClientId)
        }
    }
}

/// A client's key for one operation: 1 to 255 bytes of visible ASCII without `"`, `\`, `,` and `;`; case-sensitive.
///
/// Commas are what proxies join doubled headers with, semicolons begin parameters (RFC 8941), and the quote and the
/// backslash belong to the quoted spelling. `Display` and `Debug` do not show the key: it lets its holder read an answer.
#[derive(Clone, Eq, Hash, PartialEq)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// Returns the key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads the value of an `Idempotency-Key` header, bare (`k`) or as the quoted string of RFC 8941 (`"k"`): both
    /// spellings are the same key.
    ///
    /// # Errors
    ///
    /// When the value is no key in either spelling.
    pub fn from_header(value: &[u8]) -> Result<Self, InvalidKey> {
        let text = std::str::from_utf8(value).map_err(|_| InvalidKey)?.trim_matches([' ', '\t']);
        let bare = text.strip_prefix('"').map_or(Some(text), |rest| rest.strip_suffix('"'));
        bare.ok_or(InvalidKey)?.parse()
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdempotencyKey(…)")
    }
}

/// A key that cannot be one.
#[derive(Debug, thiserror::Error)]
#[error(
    "an Idempotency-Key is 1 to 255 characters of visible ASCII without '\"', '\\', ',' and ';', bare or in double quotes; \
     a UUID is a good one"
)]
pub struct InvalidKey;

impl FromStr for IdempotencyKey {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = |b: u8| b.is_ascii_graphic() && !matches!(b, b'"' | b'\\' | b',' | b';');
        if (1..=255).contains(&text.len()) && text.bytes().all(allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidKey)
        }
    }
}

/// What a key is unique within.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Scope {
    /// The account.
    pub client: ClientId,
    /// The named state change, `orders.create`.
    pub operation: &'static str,
    /// The client's key.
    pub key: IdempotencyKey,
}

/// The typed intent of one request; what the request hash is taken over.
pub trait Command: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// The operation's name, part of its keys' scope: `orders.create`.
    const OPERATION: &'static str;

    /// Checks what the types cannot say.
    ///
    /// Runs only for a key that is not known yet, so that a rule tightened by a deploy never refuses the retry of what
    /// was accepted before.
    ///
    /// # Errors
    ///
    /// The first field that is not acceptable, and why.
    fn validate(&self) -> Result<(), InvalidCommand>;
}

/// A command with a field that is not acceptable.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct InvalidCommand {
    /// Path of the field in the request's body.
    pub field: &'static str,
    /// What is wrong and what would be right.
    pub reason: String,
}

/// SHA-256 over the canonical encoding of a command, and that encoding's version.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RequestHash {
    /// Version of the canonical encoding.
    pub version: i16,
    /// The hash.
    pub bytes: [u8; 32],
}

impl RequestHash {
    /// The version that this binary writes.
    pub const VERSION: i16 = 1;

    /// Hashes a command: the length-prefixed operation, then its JSON with sorted keys and no white space.
    ///
    /// # Errors
    ///
    /// When the command cannot be written as JSON.
    pub fn of<C: Command>(command: &C) -> Result<Self, serde_json::Error> {
        let mut value = serde_json::to_value(command)?;
        value.sort_all_objects();
        let canonical = serde_json::to_vec(&value)?;
        let mut hasher = Sha256::new();
        for part in [C::OPERATION.as_bytes(), &canonical] {
            hasher.update((part.len() as u64).to_be_bytes());
            hasher.update(part);
        }
        Ok(Self { version: Self::VERSION, bytes: hasher.finalize().into() })
    }
}

/// A response as it is stored with a completed key and replayed byte for byte.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StoredResponse {
    /// HTTP status, 200 to 499.
    pub code: u16,
    /// Headers worth replaying, in order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body, at most 64 KiB.
    pub body: Vec<u8>,
}

/// Who asks: identity and trace of the request at hand.
#[derive(Clone, Debug)]
pub struct Request {
    /// The request's id; tells one's own commit from another's.
    pub id: Uuid,
    /// Its W3C `traceparent`, stored with the key and handed on with the event.
    pub trace_context: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize, Serialize)]
    struct Probe {
        zeta: i64,
        alpha: String,
    }

    impl Command for Probe {
        const OPERATION: &'static str = "probes.create";

        fn validate(&self) -> Result<(), InvalidCommand> {
            Ok(())
        }
    }

    fn hash(zeta: i64, alpha: &str) -> String {
        let hash = RequestHash::of(&Probe { zeta, alpha: alpha.to_owned() }).unwrap();
        hash.bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
    }

    #[test]
    fn the_hash_of_a_command_never_changes() {
        // Another value here would answer every retry that crosses a deploy with 422: raise VERSION instead.
        assert_eq!(hash(7, "a"), "ee8f0dcd6a52f6d9399b88d29d89783743ea81180f93ba466b08afaa591edf98");
    }

    #[test]
    fn another_intent_has_another_hash() {
        assert_ne!(hash(7, "a"), hash(8, "a"));
        assert_ne!(hash(7, "a"), hash(7, "b"));
    }

    #[test]
    fn both_spellings_of_a_key_are_equal() {
        let bare = IdempotencyKey::from_header(b"8e03978e-40d5").unwrap();
        assert_eq!(bare, IdempotencyKey::from_header(b"\"8e03978e-40d5\"").unwrap());
        assert_ne!(bare, IdempotencyKey::from_header(b"8E03978E-40D5").unwrap());
    }

    #[test]
    fn refuses_what_is_no_key() {
        let long = "k".repeat(256);
        let refused: [&[u8]; 13] = [
            b"",
            b" ",
            b"\"\"",
            b"\"k",
            b"k\"",
            b"a,b",
            b"k;p=1",
            b"\"k\";p=1",
            b"a b",
            b"a\\b",
            b"k\xc3\xa9",
            b"k\x7f",
            long.as_bytes(),
        ];
        for value in refused {
            assert!(IdempotencyKey::from_header(value).is_err(), "{:?}", String::from_utf8_lossy(value));
        }
        assert!(IdempotencyKey::from_header(&long.as_bytes()[1..]).is_ok());
    }

    #[test]
    fn a_key_does_not_show_in_debug_output() {
        assert!(!format!("{:?}", IdempotencyKey::from_header(b"secret-key").unwrap()).contains("secret"));
    }
}
