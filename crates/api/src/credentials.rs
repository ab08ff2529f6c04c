//! The subcommand `credentials`.
//!
//! Standard output holds results alone, a token or the list, so that a script can take them from there.

use std::error::Error;
use std::io::Write as _;
use std::time::Duration;

use secrecy::ExposeSecret as _;
use semel_core::credentials::operator::{self, By, NewCredential, Record};
use semel_core::database::{self, DatabaseUrl};
use semel_core::schema::{self, ENGINE};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::NAME;
use crate::options::{Actor, CredentialsAction, CredentialsCommand};

pub(crate) async fn run(
    command: &CredentialsCommand,
    url: &DatabaseUrl,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    schema::verify(url, NAME, &[&ENGINE]).await?;
    let pool = database::pool(url, NAME, 1);
    let said = match &command.action {
        CredentialsAction::Create { client } => {
            let created = operator::create(&pool, client).await?;
            tell(&created, client.as_str(), 0, 0);
            token(&created)
        }
        CredentialsAction::Rotate { client, overlap_hours, by } => {
            let overlap = Duration::from_hours(*overlap_hours);
            let (created, ending) = operator::rotate(&pool, client, overlap, who(by)).await?;
            tell(&created, client.as_str(), ending, *overlap_hours);
            token(&created)
        }
        CredentialsAction::Revoke { credential, by } => {
            operator::revoke(&pool, credential, who(by)).await?;
            tracing::warn!(credential, "revoked: it is refused everywhere within half a minute");
            String::new()
        }
        CredentialsAction::List { client, json, limit } => {
            let found = operator::list(&pool, client.as_ref(), *limit).await?;
            if *json { as_json(&found)? } else { as_text(&found)? }
        }
    };
    pool.close().await;
    std::io::stdout().write_all(said.as_bytes())?;
    Ok(())
}

fn who(by: &Actor) -> By<'_> {
    By { actor: &by.actor, reason: &by.reason }
}

fn token(created: &NewCredential) -> String {
    format!("{}\n", created.token.expose_secret())
}

fn tell(created: &NewCredential, client: &str, ending: u64, in_hours: u64) {
    tracing::warn!(
        client,
        credential = created.credential_id,
        others_ending = ending,
        in_hours,
        "a credential was created; its token is shown this once and stored nowhere"
    );
}

fn as_json(found: &[Record]) -> Result<String, Box<dyn Error + Send + Sync>> {
    let rows = found.iter().map(|record| {
        Ok(json!({
            "credential": record.credential_id,
            "client": record.client_id,
            "created_at": record.created_at.format(&Rfc3339)?,
            "revoked_at": record.revoked_at.map(|at| at.format(&Rfc3339)).transpose()?,
        }))
    });
    let rows = rows.collect::<Result<Vec<Value>, time::error::Format>>()?;
    Ok(format!("{:#}\n", Value::Array(rows)))
}

fn as_text(found: &[Record]) -> Result<String, time::error::Format> {
    let now = OffsetDateTime::now_utc();
    let line = |record: &Record| {
        let standing = match record.revoked_at {
            None => "good".to_owned(),
            Some(at) if at > now => format!("ends {}", at.format(&Rfc3339)?),
            Some(at) => format!("revoked {}", at.format(&Rfc3339)?),
        };
        let created = record.created_at.format(&Rfc3339)?;
        Ok(format!("{}  {:<24}  made {created}  {standing}\n", record.credential_id, record.client_id))
    };
    found.iter().map(line).collect()
}
