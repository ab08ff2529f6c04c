//! Pages: which one a query asks for, and how one is answered.

use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use axum::response::{IntoResponse as _, Response};
use semel_payments::page::{Cursor, MAX_LIMIT, Page};
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};

use crate::error::ApiError;
use crate::json::InvalidBody;

/// Entries of a page where the query does not say.
pub(crate) const LIMIT: u32 = 20;

/// The query of a list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Asked {
    limit: Option<String>,
    cursor: Option<String>,
}

/// Reads which page a query asks for.
pub(crate) fn page(query: Result<Query<Asked>, QueryRejection>) -> Result<Page, ApiError> {
    let Query(asked) = query
        .map_err(|_| invalid("", "takes `limit` and `cursor`, each once, and nothing else".to_owned()))?;
    let limit = asked.limit.as_deref().map(|text| text.parse().map_err(|_| limit_invalid())).transpose()?;
    page_of(limit, asked.cursor.as_deref())
}

/// Checks which page is asked for.
pub(crate) fn page_of(limit: Option<u32>, cursor: Option<&str>) -> Result<Page, ApiError> {
    let limit = limit.unwrap_or(LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(limit_invalid());
    }
    let after = cursor.map(str::parse::<Cursor>).transpose();
    let after = after.map_err(|error| invalid("cursor", error.to_string()))?;
    Ok(Page { limit, after })
}

fn limit_invalid() -> ApiError {
    invalid("limit", format!("must be a whole number from 1 to {MAX_LIMIT}"))
}

fn invalid(field: &str, reason: String) -> ApiError {
    ApiError::Query(InvalidBody { field: field.to_owned(), reason })
}

/// Writes a page: the entries under their name, and where the next page begins if there is one.
pub(crate) fn written(name: &'static str, entries: impl Serialize, next: Option<Cursor>) -> Response {
    let mut page = Map::new();
    page.insert(name.to_owned(), json!(entries));
    if let Some(next) = next {
        page.insert("next_cursor".to_owned(), json!(next.to_string()));
    }
    Json(page).into_response()
}
