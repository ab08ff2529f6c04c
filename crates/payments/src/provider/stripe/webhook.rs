//! Who sends a webhook: the signature of Stripe's events.
//!
//! Promise: what passes was signed with one of our secrets, within five minutes of now by this process's clock, and is
//! those very bytes. The rules are those of <https://docs.stripe.com/webhooks#verify-manually>: HMAC-SHA256 over
//! `<timestamp>.<body>`, in hexadecimal digits. Secrets are compared in constant time, and nothing prints them.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hmac::{Hmac, KeyInit as _, Mac as _};
use secrecy::{ExposeSecret as _, SecretString};
use sha2::Sha256;
use subtle::{Choice, ConstantTimeEq as _};

use super::objects::{Event, PaymentIntent, Refund};

/// How far from now, before or after, an event may have been signed.
pub const TOLERANCE: Duration = Duration::from_mins(5);

/// Most secrets at a time: an old one, and the one that replaces it.
const MOST_SECRETS: usize = 2;
/// Most signatures of one event that are looked at: Stripe sends one for each secret that is valid.
const MOST_SIGNATURES: usize = 8;
/// Bytes of an HMAC-SHA256.
const DIGEST: usize = 32;

/// The signing secrets of our endpoint. Nothing prints them.
#[derive(Clone)]
pub struct Secrets(Vec<SecretString>);

/// Shows how many there are.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Secrets").field(&self.0.len()).finish()
    }
}

/// A text that is no such secrets; it is not repeated.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not a signing secret such as whsec_…, or two of them separated by a blank")]
pub struct InvalidSecrets;

impl FromStr for Secrets {
    type Err = InvalidSecrets;

    fn from_str(text: &str) -> Result<Self, InvalidSecrets> {
        let secrets: Vec<_> = text.split_ascii_whitespace().collect();
        let is_secret = |secret: &&str| {
            let rest = secret.strip_prefix("whsec_").unwrap_or_default();
            (16..=255).contains(&rest.len()) && rest.bytes().all(|byte| byte.is_ascii_graphic())
        };
        if (1..=MOST_SECRETS).contains(&secrets.len()) && secrets.iter().all(is_secret) {
            Ok(Self(secrets.into_iter().map(SecretString::from).collect()))
        } else {
            Err(InvalidSecrets)
        }
    }
}

/// Why an event is not taken for Stripe's.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum InvalidSignature {
    /// The header is none.
    #[error("the signature's header is missing or malformed")]
    Malformed,
    /// No signature is one of ours over these bytes.
    #[error("no signature fits")]
    Wrong,
    /// It was signed too long ago, or is from the future.
    #[error("signed too far from now")]
    OutOfTime,
}

impl Secrets {
    /// Checks the header of an event against its body as it came.
    ///
    /// # Errors
    ///
    /// When it is not to be believed.
    pub fn verify(&self, signed: &Signed<'_>, body: &[u8]) -> Result<(), InvalidSignature> {
        // All are compared, so that how long it takes tells nothing.
        let fits = self.0.iter().fold(Choice::from(0), |fits, secret| {
            let ours = digest(secret, signed.timestamp, body);
            signed.signatures.iter().fold(fits, |fits, theirs| fits | ours.ct_eq(theirs))
        });
        if bool::from(fits) { Ok(()) } else { Err(InvalidSignature::Wrong) }
    }
}

fn digest(secret: &SecretString, timestamp: &str, body: &[u8]) -> [u8; DIGEST] {
    // A key of any length is one.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret.expose_secret().as_bytes()) else {
        return [0; DIGEST];
    };
    mac.update(timestamp.as_bytes());
    mac.update(b".");
    mac.update(body);
    mac.finalize().into_bytes().into()
}

/// What the header of an event says, `t=<seconds>,v1=<hexadecimal>[,v1=…]`. Nothing of it is believed so far.
#[derive(Debug)]
pub struct Signed<'a> {
    /// As it was signed.
    timestamp: &'a str,
    signatures: Vec<[u8; DIGEST]>,
}

impl<'a> Signed<'a> {
    /// Reads it before the body is here, so that nobody waits for one that is not believed whatever it is.
    ///
    /// # Errors
    ///
    /// When it is none, or says that it was signed too far from now.
    pub fn read(header: &'a str, now: SystemTime) -> Result<Self, InvalidSignature> {
        let (signed, seconds) = Self::parse(header).ok_or(InvalidSignature::Malformed)?;
        let at = UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).ok_or(InvalidSignature::OutOfTime)?;
        let off = now.duration_since(at).unwrap_or_else(|ahead| ahead.duration());
        if off > TOLERANCE { Err(InvalidSignature::OutOfTime) } else { Ok(signed) }
    }

    /// Reads it strictly: one timestamp, and at least one signature of version 1. Other schemes are passed over.
    fn parse(header: &'a str) -> Option<(Self, u64)> {
        let (mut timestamp, mut signatures) = (None, Vec::new());
        for part in header.split(',') {
            match part.split_once('=')? {
                ("t", text) if timestamp.is_none() => timestamp = Some(text),
                ("t", _) => return None,
                ("v1", _) if signatures.len() == MOST_SIGNATURES => return None,
                ("v1", text) => signatures.push(hexadecimal(text)?),
                _ => {}
            }
        }
        let timestamp = timestamp.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
        (!signatures.is_empty()).then_some((Self { timestamp, signatures }, timestamp.parse().ok()?))
    }
}

fn hexadecimal(text: &str) -> Option<[u8; DIGEST]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let bytes: Option<Vec<u8>> = text
        .as_bytes()
        .chunks(2)
        .map(|pair| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?))
        .collect();
    bytes?.try_into().ok()
}

/// What an event is about, as far as it concerns payments and refunds.
#[derive(Debug)]
pub enum About {
    /// A charge, as it stood then.
    Charge(Box<PaymentIntent>),
    /// A refund, as it stood then.
    Refund(Box<Refund>),
    /// Something else.
    Other,
}

impl Event {
    /// Reads what the event is about.
    ///
    /// # Errors
    ///
    /// When its object is not what the event's type says.
    pub fn about(&self) -> Result<About, serde_json::Error> {
        let object = self.data.object.get();
        let kind = self.kind.as_str();
        if kind.starts_with("payment_intent.") {
            serde_json::from_str(object).map(About::Charge)
        } else if kind.starts_with("refund.") || kind == "charge.refund.updated" {
            serde_json::from_str(object).map(About::Refund)
        } else {
            Ok(About::Other)
        }
    }
}

#[cfg(test)]
mod tests;
