//! The command `semel-bed`; see [`semel_tests::bed`].

#[tokio::main]
async fn main() -> anyhow::Result<std::process::ExitCode> {
    semel_tests::bed::run().await
}
