//! Whose account is charged: the API key and its mode.

use std::fmt;
use std::str::FromStr;

use http::HeaderValue;
use http::uri::{Authority, Scheme, Uri};

/// A secret or restricted API key. Nothing prints it.
#[derive(Clone)]
pub struct ApiKey {
    /// The header that it goes into, marked as not to be shown.
    header: HeaderValue,
    livemode: bool,
}

impl ApiKey {
    /// Says whether it moves real money.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.livemode
    }

    pub(super) fn header(&self) -> HeaderValue {
        self.header.clone()
    }
}

/// Shows the mode alone.
impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey").field("livemode", &self.livemode).finish_non_exhaustive()
    }
}

/// A text that is no API key; it is not repeated.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not a secret key such as sk_test_… or sk_live_…, nor a restricted one such as rk_live_…")]
pub struct InvalidApiKey;

impl FromStr for ApiKey {
    type Err = InvalidApiKey;

    fn from_str(text: &str) -> Result<Self, InvalidApiKey> {
        let of =
            |mode: &str| ["sk", "rk"].iter().find_map(|kind| text.strip_prefix(&format!("{kind}_{mode}_")));
        let (rest, livemode) = match (of("test"), of("live")) {
            (Some(rest), _) => (rest, false),
            (None, Some(rest)) => (rest, true),
            (None, None) => return Err(InvalidApiKey),
        };
        let is_key =
            (1..=255).contains(&rest.len()) && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !is_key {
            return Err(InvalidApiKey);
        }
        let mut header = HeaderValue::try_from(format!("Bearer {text}")).map_err(|_| InvalidApiKey)?;
        header.set_sensitive(true);
        Ok(Self { header, livemode })
    }
}

/// Where the API is: Stripe's own, or for a test another place.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ApiBase {
    pub(super) scheme: Scheme,
    pub(super) authority: Authority,
}

impl ApiBase {
    /// Stripe's own.
    pub const DEFAULT: &'static str = "https://api.stripe.com";

    /// Says whether it is Stripe's own.
    #[must_use]
    pub fn is_stripes_own(&self) -> bool {
        self.to_string() == Self::DEFAULT
    }
}

impl fmt::Display for ApiBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.authority)
    }
}

/// A text that is no place of the API.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "not a URL such as https://api.stripe.com; http:// is for this machine alone, such as http://127.0.0.1:8420"
)]
pub struct InvalidApiBase;

impl FromStr for ApiBase {
    type Err = InvalidApiBase;

    fn from_str(text: &str) -> Result<Self, InvalidApiBase> {
        let parts = text.parse::<Uri>().map_err(|_| InvalidApiBase)?.into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return Err(InvalidApiBase);
        };
        let is_bare = parts.path_and_query.is_none_or(|path| path == "/")
            && !authority.host().is_empty()
            && !authority.as_str().contains('@');
        let is_safe = scheme == Scheme::HTTPS
            || (scheme == Scheme::HTTP && matches!(authority.host(), "127.0.0.1" | "localhost" | "[::1]"));
        if is_bare && is_safe { Ok(Self { scheme, authority }) } else { Err(InvalidApiBase) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_tells_its_mode_and_nothing_else() {
        for (text, livemode) in
            [("sk_test_a1", false), ("rk_test_a1", false), ("sk_live_s3cret", true), ("rk_live_s3cret", true)]
        {
            let key: ApiKey = text.parse().unwrap();
            assert_eq!(key.is_live(), livemode, "{text}");
            let shown = format!("{key:?} {:?}", key.header());
            assert!(!shown.contains("s3cret") && !shown.contains("a1"), "{shown}");
        }
    }

    #[test]
    fn refuses_what_is_no_key_without_repeating_it() {
        for text in [
            "",
            "sk_test_",
            "sk_s3cret",
            "pk_live_s3cret",
            "sk_live_s3 cret",
            "sk_live_s3\ncret",
            "SK_LIVE_s3cret",
        ] {
            let error = text.parse::<ApiKey>().unwrap_err();
            assert!(!error.to_string().contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn plain_text_stays_on_this_machine() {
        for base in [
            "https://api.stripe.com",
            "https://proxy:8443/",
            "http://127.0.0.1:1",
            "http://[::1]:1",
            "http://localhost:1",
        ] {
            assert!(base.parse::<ApiBase>().is_ok(), "{base}");
        }
        for base in [
            "http://api.stripe.com",
            "http://10.0.0.1:1",
            "http://localhost.example:1",
            "https://u@api.stripe.com",
            "https://api.stripe.com/v1",
            "https://api.stripe.com?x",
            "api.stripe.com",
            "ftp://api.stripe.com",
        ] {
            assert!(base.parse::<ApiBase>().is_err(), "{base}");
        }
    }
}
