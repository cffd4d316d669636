//! TLS for both sides: who one is, whom one believes, and the session that follows `STARTTLS`.
//!
//! Certificates are X.509, TLS is 1.2 or 1.3, as rustls does it. Credentials come as PEM texts,
//! since this crate opens no files. A server that has them serves nobody without; a client that has
//! them speaks to no server without.
//!
//! In the place of certificates there may be keys that both sides share beforehand
//! ([`SharedKeys`]). rustls does not have those: with the feature `psk` the system's OpenSSL does
//! them, without it they are refused ([`PSK_MISSING`]).
//!
//! Left out: certificates without alternative names, which say nothing about a host; resuming
//! sessions.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, ConfigBuilder, ConfigSide,
    DigitallySignedStruct, Error, RootCertStore, ServerConfig, ServerConnection, SignatureScheme,
    WantsVerifier, WantsVersions,
};

pub(crate) mod connection;
mod keys;
mod name;
#[cfg(feature = "psk")]
mod psk;
#[cfg(not(feature = "psk"))]
#[path = "tls/psk_missing.rs"]
mod psk;
pub(crate) mod session;

use connection::Connection;
pub use keys::{KEY_BYTES_MAX, KEY_BYTES_MIN, KeysError, SharedKeys, USER_BYTES_MAX};
pub use psk::PSK_MISSING;

/// Certificates of one side, as PEM.
#[derive(Clone, Copy, Debug)]
pub struct Pem<'a> {
    /// The authorities whose word counts; at least one.
    pub authorities: &'a [u8],
    /// Certificates of theirs that count no more.
    pub revoked: Option<&'a [u8]>,
    /// Identity of this side. Servers need it; clients do if the server asks.
    pub identity: Option<Identity<'a>>,
}

/// A certificate and what proves that it is ours, as PEM.
#[derive(Clone, Copy)]
pub struct Identity<'a> {
    /// The certificate, then those between it and the authority.
    pub certificates: &'a [u8],
    /// Its private key, not encrypted: PKCS #8, PKCS #1 or SEC 1.
    pub key: &'a [u8],
}

impl fmt::Debug for Identity<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity")
    }
}

/// Whether the other side has to prove who it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeerCheck {
    /// The peer needs a certificate of one of the authorities; a server's for its name, too.
    #[default]
    Required,
    /// The peer is not checked. A client without the check is safe from eavesdroppers, not from
    /// other servers that answer in the server's place.
    Off,
}

/// Why credentials are of no use; the words are for humans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CredentialsError {
    /// The authorities' certificates.
    Authorities(String),
    /// The list of revoked certificates.
    Revoked(String),
    /// Our certificate.
    Certificate(String),
    /// Our private key.
    Key(String),
    /// Our certificate and our key do not belong together.
    Mismatch,
    /// A server has no certificate.
    NoIdentity,
    /// A client does not know for which host the server's certificate has to be.
    NoHostname,
    /// The host has no name that a certificate could have.
    Hostname(String),
    /// Keys shared beforehand are not supported by this program: [`PSK_MISSING`] says why.
    KeysUnsupported,
    /// A server has no keys, so there is nobody to serve.
    NoKeys,
    /// A client has no key for this user.
    NoSuchUser(String),
    /// The library that uses the keys has failed.
    Library(String),
}

impl fmt::Display for CredentialsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CredentialsError::Authorities(why) => write!(f, "the CA certificates: {why}"),
            CredentialsError::Revoked(why) => write!(f, "the revocation list: {why}"),
            CredentialsError::Certificate(why) => write!(f, "the certificate: {why}"),
            CredentialsError::Key(why) => write!(f, "the private key: {why}"),
            CredentialsError::Mismatch => {
                f.write_str("The certificate and the given key do not match.")
            }
            CredentialsError::NoIdentity => f.write_str("a server needs a certificate"),
            CredentialsError::NoHostname => f.write_str("No hostname for certificate validation"),
            CredentialsError::Hostname(name) => {
                write!(f, "'{name}' is not a valid host name for a certificate")
            }
            CredentialsError::KeysUnsupported => {
                f.write_str(PSK_MISSING.unwrap_or("keys shared beforehand are not supported"))
            }
            CredentialsError::NoKeys => {
                f.write_str("there is no key, so no client could be served")
            }
            CredentialsError::NoSuchUser(user) => write!(f, "there is no key for user '{user}'"),
            CredentialsError::Library(why) => write!(f, "OpenSSL: {why}"),
        }
    }
}

impl std::error::Error for CredentialsError {}

/// Why a session has not begun, or has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsError(String);

impl TlsError {
    #[cfg(feature = "psk")]
    fn in_words(text: String) -> TlsError {
        TlsError(text)
    }
}

impl From<Error> for TlsError {
    fn from(error: Error) -> TlsError {
        TlsError(words(&error))
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TlsError {}

/// QEMU's words where it has some.
fn words(error: &Error) -> String {
    let text = match error {
        Error::InvalidCertificate(why) => match why {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "The certificate has expired"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "The certificate is not yet activated"
            }
            CertificateError::UnknownIssuer => "The certificate hasn't got a known issuer",
            CertificateError::Revoked => "The certificate has been revoked",
            CertificateError::BadSignature => "The certificate is not trusted",
            CertificateError::NotValidForName => "Certificate does not match the hostname",
            CertificateError::NotValidForNameContext { expected, .. } => {
                let name = expected.to_str();
                return format!("Certificate does not match the hostname {name}");
            }
            _ => return format!("Invalid certificate: {why}"),
        },
        Error::NoCertificatesPresented => "No certificate was found.",
        _ => return format!("TLS: {error}"),
    };
    text.to_string()
}

/// The parts of a [`Pem`], decoded.
struct Parts {
    roots: Arc<RootCertStore>,
    revoked: Vec<CertificateRevocationListDer<'static>>,
    chain: Vec<CertificateDer<'static>>,
    key: Option<PrivateKeyDer<'static>>,
}

impl Parts {
    fn of(pem: &Pem<'_>) -> Result<Parts, CredentialsError> {
        let mut roots = RootCertStore::empty();
        for authority in certificates(pem.authorities).map_err(CredentialsError::Authorities)? {
            let added = roots.add(authority);
            added.map_err(|error| CredentialsError::Authorities(words(&error)))?;
        }
        let lists = pem
            .revoked
            .map(CertificateRevocationListDer::pem_slice_iter);
        let revoked: Result<Vec<_>, _> = lists.into_iter().flatten().collect();
        let revoked = revoked.map_err(|error| CredentialsError::Revoked(error.to_string()))?;
        let (mut chain, mut key) = (Vec::new(), None);
        if let Some(identity) = &pem.identity {
            let certificates = certificates(identity.certificates);
            chain = certificates.map_err(CredentialsError::Certificate)?;
            let found = PrivateKeyDer::from_pem_slice(identity.key);
            key = Some(found.map_err(|error| {
                CredentialsError::Key(match error {
                    rustls::pki_types::pem::Error::NoItemsFound => {
                        "no private key was found that is not encrypted".to_string()
                    }
                    error => error.to_string(),
                })
            })?);
        }
        Ok(Parts {
            roots: Arc::new(roots),
            revoked,
            chain,
            key,
        })
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if found.is_empty() => Err("no certificate was found".to_string()),
        Ok(found) => Ok(found),
        Err(error) => Err(error.to_string()),
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Takes the library's choice of versions.
fn with_versions<S: ConfigSide>(
    builder: ConfigBuilder<S, WantsVersions>,
) -> ConfigBuilder<S, WantsVerifier> {
    let builder = builder.with_safe_default_protocol_versions();
    builder.expect("the provider has ciphers for all versions")
}

/// Returns the error for the library's complaint about our own certificate or key.
fn of_identity(error: &Error) -> CredentialsError {
    match error {
        Error::InconsistentKeys(_) => CredentialsError::Mismatch,
        Error::InvalidCertificate(_) => CredentialsError::Certificate(words(error)),
        error => CredentialsError::Key(words(error)),
    }
}

fn of_verifier(error: &rustls::server::VerifierBuilderError) -> CredentialsError {
    match error {
        rustls::server::VerifierBuilderError::InvalidCrl(why) => {
            CredentialsError::Revoked(format!("{why:?}"))
        }
        error => CredentialsError::Authorities(error.to_string()),
    }
}

fn server_verifier(
    roots: &Arc<RootCertStore>,
    revoked: Vec<CertificateRevocationListDer<'static>>,
) -> Result<Arc<WebPkiServerVerifier>, CredentialsError> {
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), provider())
        .with_crls(revoked)
        .allow_unknown_revocation_status()
        .enforce_revocation_expiration();
    verifier.build().map_err(|error| of_verifier(&error))
}

fn client_verifier(
    roots: &Arc<RootCertStore>,
    revoked: Vec<CertificateRevocationListDer<'static>>,
) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, CredentialsError> {
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider())
        .with_crls(revoked)
        .allow_unknown_revocation_status()
        .enforce_revocation_expiration();
    verifier.build().map_err(|error| of_verifier(&error))
}

type Authorization = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Identity that the other side has proven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A peer that had to prove nothing.
    Nobody,
    /// The subject of this certificate, as DER.
    Certificate(Vec<u8>),
    /// A user who has this user's key.
    #[cfg_attr(not(feature = "psk"), allow(dead_code))] // Nobody has a key there.
    User(String),
}

/// Credentials of one side, made ready.
#[derive(Clone)]
enum Proof<T> {
    Certificates(T),
    Keys(psk::Context),
}

/// Credentials of a server that serves over TLS, and over nothing else.
#[derive(Clone)]
pub struct ServerTls {
    proof: Proof<Arc<ServerConfig>>,
    authorization: Option<Authorization>,
}

cowslip_block::debug_by_name!(ServerTls);

impl ServerTls {
    /// Takes over the server's credentials.
    ///
    /// # Errors
    /// They cannot be used.
    pub fn new(pem: &Pem<'_>, check: PeerCheck) -> Result<ServerTls, CredentialsError> {
        let parts = Parts::of(pem)?;
        let key = parts.key.ok_or(CredentialsError::NoIdentity)?;
        let builder = with_versions(ServerConfig::builder_with_provider(provider()));
        let builder = match check {
            PeerCheck::Required => {
                builder.with_client_cert_verifier(client_verifier(&parts.roots, parts.revoked)?)
            }
            PeerCheck::Off => builder.with_no_client_auth(),
        };
        let config = builder.with_single_cert(parts.chain, key);
        let mut config = config.map_err(|error| of_identity(&error))?;
        // Sessions that are resumed would skip what has been revoked meanwhile.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(ServerTls {
            proof: Proof::Certificates(Arc::new(config)),
            authorization: None,
        })
    }

    /// Serves everybody who has one of the keys, and nobody else.
    ///
    /// # Errors
    /// There are none, or they cannot be used.
    pub fn with_keys(keys: SharedKeys) -> Result<ServerTls, CredentialsError> {
        if keys.is_empty() {
            return Err(CredentialsError::NoKeys);
        }
        Ok(ServerTls {
            proof: Proof::Keys(psk::Context::server(keys)?),
            authorization: None,
        })
    }

    /// Serves those clients only for whom `is_allowed` holds. It gets the subject of their
    /// certificate, as `C=DE,O=Example,CN=client`, or the name of the user whose key they have. A
    /// client with neither is not served.
    #[must_use]
    pub fn authorized_by(
        self,
        is_allowed: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> ServerTls {
        ServerTls {
            authorization: Some(Arc::new(is_allowed)),
            ..self
        }
    }

    pub(crate) fn connection(&self) -> Result<Connection, TlsError> {
        match &self.proof {
            Proof::Certificates(config) => {
                let connection = ServerConnection::new(Arc::clone(config))?;
                Ok(rustls::Connection::from(connection).into())
            }
            Proof::Keys(context) => context.connection().map(Connection::Keys),
        }
    }

    /// Whether a client who is that is served; the error is for the log.
    pub(crate) fn authorize(&self, peer: &Peer) -> Result<(), String> {
        let Some(is_allowed) = &self.authorization else {
            return Ok(());
        };
        let (kind, name) = match peer {
            Peer::Nobody => ("x509", None),
            Peer::Certificate(certificate) => ("x509", name::subject(certificate)),
            Peer::User(user) => ("psk", Some(user.clone())),
        };
        match name {
            Some(name) if is_allowed(&name) => Ok(()),
            Some(name) => Err(format!("TLS {kind} authz check for {name} is denied")),
            None => Err(format!(
                "TLS {kind} authz check: the client has no name to be checked"
            )),
        }
    }
}

/// Credentials of a client for servers over TLS.
#[derive(Clone)]
pub struct ClientCredentials {
    proof: Proof<(Arc<ClientConfig>, PeerCheck)>,
}

cowslip_block::debug_by_name!(ClientCredentials);

impl ClientCredentials {
    /// Takes over the client's credentials.
    ///
    /// # Errors
    /// They cannot be used.
    pub fn new(pem: &Pem<'_>, check: PeerCheck) -> Result<ClientCredentials, CredentialsError> {
        let parts = Parts::of(pem)?;
        let builder = with_versions(ClientConfig::builder_with_provider(provider()));
        let builder = match check {
            PeerCheck::Required => {
                builder.with_webpki_verifier(server_verifier(&parts.roots, parts.revoked)?)
            }
            PeerCheck::Off => {
                let anybody = Arc::new(Anybody(provider()));
                builder
                    .dangerous()
                    .with_custom_certificate_verifier(anybody)
            }
        };
        let mut config = match parts.key {
            Some(key) => {
                let config = builder.with_client_auth_cert(parts.chain, key);
                config.map_err(|error| of_identity(&error))?
            }
            None => builder.with_no_client_auth(),
        };
        config.resumption = Resumption::disabled();
        // The name is not looked at, so it is nobody's business either.
        config.enable_sni = check == PeerCheck::Required;
        Ok(ClientCredentials {
            proof: Proof::Certificates((Arc::new(config), check)),
        })
    }

    /// Returns the credentials of this user, for servers that have the same key for him.
    ///
    /// # Errors
    /// There is no key for him, or it cannot be used.
    pub fn with_key_of(
        user: &str,
        keys: &SharedKeys,
    ) -> Result<ClientCredentials, CredentialsError> {
        Ok(ClientCredentials {
            proof: Proof::Keys(psk::Context::client(user, keys)?),
        })
    }

    /// Returns the means to speak to a server whose certificate has to be for `hostname`: a name,
    /// or an address. A server that has the key needs no name.
    ///
    /// # Errors
    /// No certificate can be for that.
    pub fn to_server(&self, hostname: Option<&str>) -> Result<ClientTls, CredentialsError> {
        let (config, check) = match &self.proof {
            Proof::Certificates((config, check)) => (config, *check),
            Proof::Keys(context) => return Ok(ClientTls(Proof::Keys(context.clone()))),
        };
        let hostname = match (hostname, check) {
            (Some(hostname), _) => hostname,
            (None, PeerCheck::Off) => "localhost",
            (None, PeerCheck::Required) => return Err(CredentialsError::NoHostname),
        };
        let name = ServerName::try_from(hostname.to_string());
        let name = name.map_err(|_| CredentialsError::Hostname(hostname.to_string()))?;
        Ok(ClientTls(Proof::Certificates((Arc::clone(config), name))))
    }
}

/// Credentials of a client for one server over TLS, and over nothing else.
#[derive(Clone)]
pub struct ClientTls(Proof<(Arc<ClientConfig>, ServerName<'static>)>);

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tuple = f.debug_tuple("ClientTls");
        if let Proof::Certificates((_, name)) = &self.0 {
            tuple.field(name);
        }
        tuple.finish()
    }
}

impl ClientTls {
    pub(crate) fn connection(&self) -> Result<Connection, TlsError> {
        match &self.0 {
            Proof::Certificates((config, name)) => {
                let connection = ClientConnection::new(Arc::clone(config), name.clone())?;
                Ok(rustls::Connection::from(connection).into())
            }
            Proof::Keys(context) => context.connection().map(Connection::Keys),
        }
    }
}

/// The side that a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// The one that is connected to.
    Server,
    /// The one that connects.
    Client,
}

/// Whether our own certificate, if there is one, would convince a peer that believes our
/// authorities, now; its name is not looked at. Mistakes show here rather than at the peer, which
/// says little of them.
///
/// # Errors
/// Why it would not: [`CredentialsError::Certificate`] says it of the certificate.
pub fn examine_own(pem: &Pem<'_>, endpoint: Endpoint) -> Result<(), CredentialsError> {
    let parts = Parts::of(pem)?;
    let Some((own, between)) = parts.chain.split_first() else {
        return Ok(());
    };
    let now = UnixTime::now();
    let examined = match endpoint {
        Endpoint::Server => {
            let verifier = server_verifier(&parts.roots, parts.revoked)?;
            let any_name = ServerName::try_from("localhost").expect("it is a name");
            let verified = verifier.verify_server_cert(own, between, &any_name, &[], now);
            verified.map(drop)
        }
        Endpoint::Client => {
            let verifier = client_verifier(&parts.roots, parts.revoked)?;
            verifier.verify_client_cert(own, between, now).map(drop)
        }
    };
    match examined {
        Err(Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ))
        | Ok(()) => Ok(()),
        Err(error) => Err(CredentialsError::Certificate(words(&error))),
    }
}

/// Believes that every server is who it says it is, if only it has the key of the certificate that
/// it shows.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl Anybody {
    fn algorithms(&self) -> &WebPkiSupportedAlgorithms {
        &self.0.signature_verification_algorithms
    }
}

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _own: &CertificateDer<'_>,
        _between: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, self.algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, self.algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms().supported_schemes()
    }
}
