//! A virtual host of one's own.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use reqwest::Url;

use super::management::Management;
use super::rabbitmq::{RabbitMq, vhost_url};
use super::{at_the_end, check_name};
use crate::net::unique_name;

/// A virtual host, deleted with this value unless it is a lasting or a shared one.
///
/// It is shared where a RabbitMQ was given whose management API cannot be reached: then it is the
/// given virtual host, and only [`scoped`](Self::scoped) names are one's own.
#[derive(Debug)]
pub struct Vhost {
    name: String,
    url: Url,
    management: Option<Management>,
    /// Stands before every name in a shared virtual host.
    scope: Option<String>,
    /// Whether it must still be deleted.
    owed: AtomicBool,
}

impl Vhost {
    pub(super) async fn create(server: &RabbitMq, prefix: &str) -> Result<Self> {
        check_name(prefix)?;
        let name = unique_name(prefix);
        match &server.management {
            Some(management) => {
                management.create_vhost(&name).await?;
                Ok(Self::new(server, name, None, true))
            }
            None => Ok(Self::new(server, server.given_vhost(), Some(name), false)),
        }
    }

    pub(super) async fn lasting(server: &RabbitMq, name: &str) -> Result<Self> {
        check_name(name)?;
        match &server.management {
            Some(management) => {
                management.create_vhost(name).await?;
                Ok(Self::new(server, name.to_owned(), None, false))
            }
            None => Ok(Self::new(server, server.given_vhost(), Some(name.to_owned()), false)),
        }
    }

    fn new(server: &RabbitMq, name: String, scope: Option<String>, owed: bool) -> Self {
        let url = vhost_url(&server.url, &name);
        Self { name, url, management: server.management.clone(), scope, owed: AtomicBool::new(owed) }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its URL for the server's user.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.to_string()
    }

    /// Its URL for another user.
    #[must_use]
    pub fn url_as(&self, user: &str, password: &str) -> String {
        let mut url = self.url.clone();
        // Both fail only for a URL without a host, and this one was connected to.
        let _ = url.set_username(user);
        let _ = url.set_password(Some(password));
        url.into()
    }

    /// A name for an exchange or a queue that nobody else uses: the name as it is, but in a shared
    /// virtual host with a unique prefix.
    #[must_use]
    pub fn scoped(&self, name: &str) -> String {
        match &self.scope {
            Some(scope) => format!("{scope}.{name}"),
            None => name.to_owned(),
        }
    }

    /// Whether others may use it too.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.scope.is_some()
    }

    /// The management API; none in a shared virtual host.
    #[must_use]
    pub fn management(&self) -> Option<&Management> {
        self.management.as_ref()
    }

    /// Deletes it now, and says whether that worked; dropping the value would tell nobody.
    ///
    /// # Errors
    ///
    /// The management API does not answer.
    pub async fn delete_now(self) -> Result<()> {
        match &self.management {
            Some(management) if self.owed.swap(false, Ordering::AcqRel) => {
                management.delete_vhost(&self.name).await
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Vhost {
    fn drop(&mut self) {
        if self.owed.swap(false, Ordering::AcqRel)
            && let Some(management) = &self.management
            // A client's connections belong to the runtime that made them.
            && let Ok(management) = Management::new(management.url().as_str())
        {
            let name = self.name.clone();
            at_the_end(async move { management.delete_vhost(&name).await });
        }
    }
}
