//! The subcommand `credentials`.

use std::error::Error;
use std::io::Write as _;

use secrecy::ExposeSecret as _;
use semel_core::database::{self, DatabaseUrl};
use semel_core::schema::{self, ENGINE};

use crate::NAME;
use crate::options::{CredentialsAction, CredentialsCommand};

pub(crate) async fn run(
    command: &CredentialsCommand,
    url: &DatabaseUrl,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let CredentialsAction::Create { client } = &command.action;
    schema::verify(url, NAME, &[&ENGINE]).await?;
    let pool = database::pool(url, NAME, 1);
    let created = semel_core::credentials::create(&pool, client).await?;
    // The token alone on standard output, so that a script can take it from there.
    writeln!(std::io::stdout(), "{}", created.token.expose_secret())?;
    tracing::warn!(
        client = client.as_str(),
        credential = created.credential_id,
        "a credential was created; its token is shown this once and stored nowhere"
    );
    pool.close().await;
    Ok(())
}
