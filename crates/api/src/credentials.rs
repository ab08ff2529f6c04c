//! The subcommand `credentials`.
//!
//! Standard output holds results alone, a token or the list, so that a script can take them from there.

use std::error::Error;
use std::io::Write as _;
use std::time::Duration;

use secrecy::ExposeSecret as _;
use semel_core::credentials::Scopes;
use semel_core::credentials::operator::{self, By, CredentialId, NewCredential, Record};
use semel_core::database::{self, DatabaseUrl};
use semel_core::schema::{self, ENGINE};
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;

use crate::NAME;
use crate::access::Access;
use crate::options::{Actor, CredentialsAction, CredentialsCommand};

pub(crate) async fn run(
    command: &CredentialsCommand,
    url: &DatabaseUrl,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    schema::verify(url, NAME, &[&ENGINE]).await?;
    let pool = database::pool(url, NAME, 1);
    match &command.action {
        CredentialsAction::Create { client, scopes, unless_any } => {
            let created = if *unless_any {
                operator::create_unless_any(&pool, client, &only(scopes)).await?
            } else {
                Some(operator::create(&pool, client, &only(scopes)).await?)
            };
            if let Some(created) = created {
                hand_over(&created)?;
                tracing::warn!(client = client.as_str(), credential = created.credential_id, CREATED);
            } else {
                tracing::info!(
                    client = client.as_str(),
                    "the client has a credential that is in force: none was made"
                );
            }
        }
        CredentialsAction::Rotate { client, overlap_hours, scopes, by } => {
            let overlap = Duration::from_hours(*overlap_hours);
            let (created, others_ending) = operator::rotate(
                &pool,
                client,
                overlap,
                (!scopes.is_empty()).then(|| only(scopes)).as_ref(),
                who(by),
            )
            .await?;
            hand_over(&created)?;
            tracing::warn!(
                client = client.as_str(),
                credential = created.credential_id,
                others_ending,
                in_hours = overlap_hours,
                CREATED
            );
        }
        CredentialsAction::Revoke { credential, by } => {
            // Not read by the command line's parser, which quotes what it refuses.
            let id: CredentialId = credential.parse()?;
            operator::revoke(&pool, &id, who(by)).await?;
            tracing::warn!(credential = %id, "revoked: it is refused everywhere within half a minute");
        }
        CredentialsAction::List { client, json, limit } => {
            let found = operator::list(&pool, client.as_ref(), *limit).await?;
            say(&if *json { as_json(&found)? } else { as_text(&found)? })?;
        }
    }
    pool.close().await;
    Ok(())
}

const CREATED: &str = "a credential was created; its token is shown this once and stored nowhere";

/// Writes the token out at once: it is committed, and nobody has it yet.
fn hand_over(created: &NewCredential) -> std::io::Result<()> {
    say(&format!("{}\n", created.token.expose_secret()))
}

fn say(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn only(scopes: &[Access]) -> Scopes {
    Scopes::only(scopes.iter().map(|access| access.name().to_owned()))
}

fn who(by: &Actor) -> By<'_> {
    By { actor: &by.actor, reason: &by.reason }
}

fn as_json(found: &[Record]) -> Result<String, Box<dyn Error + Send + Sync>> {
    let rows = found.iter().map(|record| {
        Ok(json!({
            "credential": record.credential_id,
            "client": record.client_id,
            "scopes": record.scopes,
            "created_at": record.created_at.format(&Rfc3339)?,
            "revoked_at": record.revoked_at.map(|at| at.format(&Rfc3339)).transpose()?,
        }))
    });
    let rows = rows.collect::<Result<Vec<Value>, time::error::Format>>()?;
    Ok(format!("{:#}\n", Value::Array(rows)))
}

fn as_text(found: &[Record]) -> Result<String, time::error::Format> {
    let line = |record: &Record| {
        let standing = match record.revoked_at {
            None => "good".to_owned(),
            Some(at) if record.is_revoked => format!("revoked {}", at.format(&Rfc3339)?),
            Some(at) => format!("ends {}", at.format(&Rfc3339)?),
        };
        let created = record.created_at.format(&Rfc3339)?;
        let scopes = record.scopes.as_ref().map_or("everything".to_owned(), |scopes| scopes.join(" "));
        let (id, client) = (&record.credential_id, &record.client_id);
        Ok(format!("{id}  {client:<24}  made {created}  {standing}  for {scopes}\n"))
    };
    found.iter().map(line).collect()
}
