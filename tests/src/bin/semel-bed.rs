//! The command `semel-bed`; see [`semel_tests::bed`].

use std::process::ExitCode;

use semel_tests::progress::Progress;

#[tokio::main]
async fn main() -> ExitCode {
    semel_tests::bed::run().await.unwrap_or_else(|error| {
        // In one line: what was attempted, and why it failed.
        Progress::Stderr.say(format_args!("{error:#}"));
        ExitCode::FAILURE
    })
}
