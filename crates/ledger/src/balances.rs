//! `GET /balances`: what each account of each client holds, for those inside.
//!
//! It asks nobody who they are and shows every client's balances, so it is off unless an address is given, and that must not be
//! a public one. It has database connections of its own, two, and so takes none from the consumer. A balance is the sum of its
//! entries at the moment of the question; pages that are asked one after another are of different moments.

use semel_core::admin::{Answer, Asked};
use semel_core::database;
use semel_core::disposition::chain;
use serde_json::{Value, json};
use sqlx::{Connection as _, PgPool};

use crate::store::{self, Page};

const PATH: &str = "/balances";
/// Balances of a page, unless asked otherwise.
const PAGE: i64 = 100;
/// Most that may be asked for.
const LONGEST_PAGE: i64 = 1000;
/// The server ends a sum that takes too long, before whoever waits for it gives it up and leaves it running.
const BEGIN: &str = "BEGIN READ ONLY; SET LOCAL statement_timeout = '8s'";
/// Connections of its own.
pub(crate) const CONNECTIONS: u32 = 2;

/// Answers one question.
pub(crate) async fn answer(pool: PgPool, asked: Asked) -> Answer {
    if asked.path != PATH {
        return told(404, &json!({ "error": format!("there is only {PATH}") }));
    }
    let page = match page(&asked.query) {
        Ok(page) => page,
        Err(error) => return told(400, &json!({ "error": error })),
    };
    let found = database::call(&pool, async |connection| {
        let mut tx = connection.begin_with(BEGIN).await?;
        let found = store::balances(&mut tx, &page).await?;
        tx.commit().await?;
        Ok(found)
    })
    .await;
    match found {
        Ok(balances) => {
            let is_full = i64::try_from(balances.len()).is_ok_and(|count| count == page.limit);
            let next = balances.last().filter(|_| is_full).map(|last| next(&page, last));
            let balances: Vec<_> = balances.iter().map(shown).collect();
            told(200, &json!({ "balances": balances, "next": next }))
        }
        Err(error) => {
            tracing::warn!("cannot read balances: {}", chain(&error));
            told(503, &json!({ "error": "the database cannot be asked: try again" }))
        }
    }
}

fn told(status: u16, body: &Value) -> Answer {
    Answer::new(status, "application/json", format!("{body}\n"))
}

fn shown(balance: &store::Balance) -> Value {
    json!({
        "client_id": balance.client_id,
        "account": balance.account,
        "currency": balance.currency,
        "balance": balance.balance,
    })
}

/// Where the next page is.
fn next(page: &Page, last: &store::Balance) -> String {
    let after = format!("{},{},{}", encoded(&last.client_id), last.account, last.currency);
    let client =
        page.client_id.as_deref().map(|id| format!("&client_id={}", encoded(id))).unwrap_or_default();
    format!("{PATH}?limit={}&after={after}{client}", page.limit)
}

/// Reads what stands behind the `?`; what it does not know it refuses.
fn page(query: &str) -> Result<Page, String> {
    let mut page = Page { limit: PAGE, ..Page::default() };
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let value = decoded(value).ok_or_else(|| format!("{name} is not text"))?;
        match name {
            "client_id" => page.client_id = Some(value),
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=LONGEST_PAGE).contains(limit));
                page.limit = limit.ok_or_else(|| format!("limit is not 1 to {LONGEST_PAGE}"))?;
            }
            "after" => {
                // A client's id may hold anything; the others are names.
                let mut parts = value.rsplitn(3, ',').map(str::to_owned);
                let (Some(currency), Some(account), Some(client)) =
                    (parts.next(), parts.next(), parts.next())
                else {
                    return Err("after is not a client, an account and a currency".to_owned());
                };
                page.after = (client, account, currency);
            }
            _ => return Err("there are only client_id, limit and after".to_owned()),
        }
    }
    Ok(page)
}

fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    let byte = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(byte).collect()
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut plain = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let mut digit = || char::from(bytes.next()?).to_digit(16);
            let (high, low) = (digit()?, digit()?);
            plain.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            plain.push(byte);
        }
    }
    // The database would refuse a NUL.
    String::from_utf8(plain).ok().filter(|text| !text.contains('\0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_goes_on_behind_the_last_balance() {
        let client_id = "a,b &c=%ü".to_owned();
        let last = store::Balance {
            client_id: client_id.clone(),
            account: "cash".to_owned(),
            currency: "EUR".to_owned(),
            balance: 1,
        };
        for client in [None, Some(client_id.clone())] {
            let asked = Page { client_id: client.clone(), limit: 7, ..Page::default() };
            let link = next(&asked, &last);
            let (path, query) = link.split_once('?').unwrap();
            assert_eq!(path, PATH);
            let after = (client_id.clone(), "cash".to_owned(), "EUR".to_owned());
            assert_eq!(page(query), Ok(Page { client_id: client, after, limit: 7 }));
        }
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        assert_eq!(page(""), Ok(Page { limit: PAGE, ..Page::default() }));
        for query in [
            "limit=0",
            "limit=1001",
            "limit=x",
            "after=a",
            "client=a",
            "client_id=%ff",
            "client_id=%00",
            "client_id=%2",
        ] {
            assert!(page(query).is_err(), "{query}");
        }
    }
}
