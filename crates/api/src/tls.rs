//! TLS on the public port: the certificate and its key, and their successors.
//!
//! Both are read at the start, where anything unusable is refused by the name of its option, and again every minute: a
//! certificate that was renewed on the disk is shown to the connections that come after. Files that cannot be used then,
//! half-written ones too, are told of and leave the earlier certificate in place.
//!
//! Clients are asked for no certificate; a token says who they are.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use semel_core::disposition::chain;
use semel_core::lifecycle::Lifecycle;
use semel_core::options::OptionError;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;

const CERT_OPTION: &str = "--tls-cert-file";
const KEY_OPTION: &str = "--tls-key-file";

/// How often the files are looked at.
const EVERY: Duration = Duration::from_mins(1);

/// Where the certificate and its key are, both PEM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TlsFiles {
    /// The certificate, and after it those of the authorities in between.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The certificate that new connections are shown; clones share it.
#[derive(Clone)]
pub struct Tls {
    files: TlsFiles,
    current: watch::Sender<Loaded>,
}

#[derive(Clone)]
struct Loaded {
    /// What the files held.
    read: Pair,
    acceptor: TlsAcceptor,
}

#[derive(Clone, Eq, PartialEq)]
struct Pair {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// Shows where they are, and nothing of the key.
impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    ///
    /// When one cannot be read, or they are no certificate and its key; the error names the option.
    pub fn load(files: TlsFiles) -> Result<Self, OptionError> {
        let read = Pair::read(&files)?;
        let acceptor = read.acceptor(&files)?;
        Ok(Self { files, current: watch::Sender::new(Loaded { read, acceptor }) })
    }

    /// Looks at the files every minute until the stop, and takes over what has changed.
    pub async fn renew(self, life: Lifecycle) {
        self.renew_every(EVERY, life).await;
    }

    /// As [`Tls::renew`], at another pace.
    pub async fn renew_every(self, every: Duration, life: Lifecycle) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(every) => {}
                () = life.stopping() => return,
            }
            match self.look_again() {
                Ok(true) => {
                    tracing::info!("the certificate was renewed: new connections are shown the new one");
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(
                        "the certificate cannot be renewed, the earlier one stays: {}",
                        chain(&error)
                    );
                }
            }
        }
    }

    fn look_again(&self) -> Result<bool, OptionError> {
        let read = Pair::read(&self.files)?;
        if self.current.borrow().read == read {
            return Ok(false);
        }
        let acceptor = read.acceptor(&self.files)?;
        self.current.send_replace(Loaded { read, acceptor });
        Ok(true)
    }

    /// Shakes hands.
    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let acceptor = self.current.borrow().acceptor.clone();
        acceptor.accept(stream).await
    }
}

impl Pair {
    fn read(files: &TlsFiles) -> Result<Self, OptionError> {
        let read = |option, path: &Path| {
            fs::read(path).map_err(|source| OptionError::File { option, path: path.to_owned(), source })
        };
        Ok(Self { certificate: read(CERT_OPTION, &files.certificate)?, key: read(KEY_OPTION, &files.key)? })
    }

    fn acceptor(&self, files: &TlsFiles) -> Result<TlsAcceptor, OptionError> {
        let unusable = |option, path: &PathBuf, why: String| OptionError::File {
            option,
            path: path.clone(),
            source: io::Error::new(io::ErrorKind::InvalidData, why),
        };
        let certificate = |why: String| unusable(CERT_OPTION, &files.certificate, why);
        let key = |why: String| unusable(KEY_OPTION, &files.key, why);

        let chain = CertificateDer::pem_slice_iter(&self.certificate).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|error| certificate(format!("it is not PEM: {error}")))?;
        if chain.is_empty() {
            return Err(certificate("there is no certificate in it".to_owned()));
        }
        // The error is not told: it may quote the file.
        let private = PrivateKeyDer::from_pem_slice(&self.key)
            .map_err(|_| key("there is no private key in it, in PEM and without a password".to_owned()))?;
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| certificate(error.to_string()))?;
        let mut config = builder.with_no_client_auth().with_single_cert(chain, private).map_err(|error| {
            if matches!(error, rustls::Error::InvalidCertificate(_)) {
                certificate(error.to_string())
            } else {
                key(format!("it does not fit the certificate: {error}"))
            }
        })?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a certificate and its key, both PEM.
    fn certified() -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let about = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        (about.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    /// What is said of files with these contents; none is a file that is not there.
    fn refused(certificate: Option<&str>, key: Option<&str>) -> Option<String> {
        let folder = std::env::temp_dir().join(format!("semel-tls-{}", uuid::Uuid::new_v4()));
        fs::create_dir(&folder).unwrap();
        let files = TlsFiles { certificate: folder.join("server.pem"), key: folder.join("server.key") };
        for (path, text) in [(&files.certificate, certificate), (&files.key, key)] {
            if let Some(text) = text {
                fs::write(path, text).unwrap();
            }
        }
        let error = Tls::load(files).err().map(|error| chain(&error));
        fs::remove_dir_all(&folder).unwrap();
        error
    }

    #[test]
    fn names_the_option_whose_file_cannot_be_used_and_quotes_no_key() {
        let (certificate, key) = certified();
        let (_, other_key) = certified();
        assert_eq!(refused(Some(&certificate), Some(&key)), None);
        for (given_certificate, given_key, option) in [
            (None, Some(key.as_str()), CERT_OPTION),
            (Some(""), Some(&key), CERT_OPTION),
            (Some(&key), Some(&key), CERT_OPTION),
            (Some("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), Some(&key), CERT_OPTION),
            (Some(&certificate), None, KEY_OPTION),
            (Some(&certificate), Some("s3cret"), KEY_OPTION),
            (Some(&certificate), Some(&certificate), KEY_OPTION),
            (Some(&certificate), Some(&other_key), KEY_OPTION),
        ] {
            let error = refused(given_certificate, given_key).unwrap();
            assert!(error.starts_with(option), "{error}");
            assert!(!error.contains("s3cret"), "{error}");
        }
    }
}
