//! What a credential may be used for.
//!
//! A scope is a word here: which there are, and what each allows, is for the API to say. A credential without a list has all
//! scopes, those of later versions included.

use std::sync::Arc;

/// The scopes of a credential.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Scopes(Option<Arc<[String]>>);

impl Scopes {
    /// All of them.
    #[must_use]
    pub fn all() -> Self {
        Self(None)
    }

    /// These alone, in order and each once; all of them where none is named.
    #[must_use]
    pub fn only(names: impl IntoIterator<Item = String>) -> Self {
        let mut names: Vec<String> = names.into_iter().collect();
        names.sort_unstable();
        names.dedup();
        Self((!names.is_empty()).then(|| names.into()))
    }

    /// Says whether this one is among them.
    #[must_use]
    pub fn allow(&self, name: &str) -> bool {
        self.names().is_none_or(|names| names.iter().any(|other| other == name))
    }

    /// Returns their names; none where all are meant.
    #[must_use]
    pub fn names(&self) -> Option<&[String]> {
        self.0.as_deref()
    }
}

impl From<Option<Vec<String>>> for Scopes {
    fn from(names: Option<Vec<String>>) -> Self {
        // A list that is empty, which no row is, allows nothing.
        Self(names.map(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_named_is_not_allowed_and_all_is_more_than_a_list() {
        let some = Scopes::only(["b:read", "a:read", "b:read"].map(str::to_owned));
        assert_eq!(some.names().unwrap(), ["a:read", "b:read"]);
        assert!(some.allow("a:read") && !some.allow("a:write") && !some.allow("a") && !some.allow(""));
        assert!(Scopes::all().allow("a:write") && Scopes::only([]) == Scopes::all());
        assert!(!Scopes::from(Some(Vec::new())).allow("a:read"));
    }
}
