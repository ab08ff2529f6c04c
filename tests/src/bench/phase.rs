//! A step of a measurement: told, and bounded in time.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::progress::Progress;

/// Awaits one step; says when it begins and how long it took. The future is boxed: a measurement's is large.
///
/// Fails as the step does, and when it is not over within `limit`.
pub(crate) fn phase<'a, T: 'a>(
    what: &'a str,
    limit: Duration,
    step: impl Future<Output = Result<T>> + 'a,
) -> Pin<Box<dyn Future<Output = Result<T>> + 'a>> {
    let bounded = async move {
        match tokio::time::timeout(limit, step).await {
            Ok(outcome) => outcome,
            Err(_) => bail!("waited {} s for {what}", limit.as_secs()),
        }
    };
    Box::pin(Progress::Stderr.step(what, bounded))
}
