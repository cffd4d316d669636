//! [`RemoteName`]: an object, and how it is read, as options describe it.

use std::path::PathBuf;
use std::time::Duration;

use cowslip_block::options::Kind::{Number, Size, Switch, Text};
use cowslip_block::options::{OptionEntry, Options, option};
use cowslip_block::{Error, Result};
use zeroize::Zeroizing;

use crate::object::OnFailure;
use crate::options::{Certificates, StoreOptions};
use crate::url::{ObjectUrl, Scheme};

/// The options of a remote file. Up to `cookie-secret` they are those of QEMU's driver `curl`.
#[rustfmt::skip] // An option a line.
pub const OPTIONS: &[OptionEntry] = &[
    option("url", Text, "", "URL of the object"),
    option("filename", Text, "", "The same"),
    option("readahead", Size, "1M", "Bytes that are fetched ahead of sequential reads"),
    option("sslverify", Switch, "on", "Check the server's certificate"),
    option("timeout", Number, "30", "Seconds for one attempt of a request"),
    option("username", Text, "", "User of a web server"),
    option("password-secret", Text, "", "ID of the secret with the user's password"),
    option("cookie", Text, "", "Cookies for a web server"),
    option("cookie-secret", Text, "", "ID of the secret with them"),
    option("endpoint", Text, "", "URL of the object store's server"),
    option("region", Text, "", "Region of the bucket"),
    option("anonymous", Switch, "off", "Send no credentials to the object store"),
    option("ca-file", Text, "", "PEM file of certificates that are trusted, too"),
    option("proxy", Text, "", "URL of a proxy"),
    option("wait-timeout", Number, "60", "Seconds for which failed requests are repeated"),
    option("on-failure", Text, "report", "After that: report an error, or stop and wait"),
    option("connections", Number, "8", "Requests under way"),
    option("block-size", Size, "64k", "Bytes that are fetched at least"),
    option("memory", Size, "16M", "Bytes kept in memory where there is no cache"),
    option("cache-dir", Text, "", "Directory of the cache; none for no cache"),
    option("cache-limit", Size, "20G", "Space that the cache may take"),
    option("trace", Text, "", "Trace of an earlier start, fetched ahead into the cache"),
    option("background", Size, "0", "Bytes a second at which the rest is cached"),
];

/// A remote object, and how it is read. What is not set comes from [`crate::Defaults`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteName {
    /// The object.
    pub url: ObjectUrl,
    /// The way to it.
    pub store: StoreOptions,
    /// User of a web server.
    pub user: Option<String>,
    /// Secrets, by their IDs.
    pub secrets: Secrets<Option<String>>,
    /// Time for which requests are repeated.
    pub wait_timeout: Option<Duration>,
    /// Treatment of a failure that lasts longer.
    pub on_failure: Option<OnFailure>,
    /// Bytes that are fetched ahead.
    pub readahead_bytes: u64,
    /// Requests under way.
    pub connections: usize,
    /// Bytes of a block, a power of two; objects that are very long have longer ones.
    pub block_bytes: u64,
    /// Bytes in memory.
    pub memory_bytes: usize,
    /// Directory of the cache; an empty one is none.
    pub cache: Option<PathBuf>,
    /// Space that the cache may take.
    pub cache_bytes: Option<u64>,
    /// Bytes a second at which the rest is cached.
    pub background_bytes: Option<u64>,
    /// A trace of an earlier start.
    pub trace: Option<PathBuf>,
    /// The file for a trace of this one. No option says it: names of images may come from anybody,
    /// and must not lead to files that are emptied.
    pub record: Option<PathBuf>,
}

/// The secrets of a remote file.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Secrets<T> {
    /// The user's password.
    pub password: T,
    /// Cookies.
    pub cookie: T,
}

impl RemoteName {
    /// An object of this URL, read as usual.
    pub fn of_url(url: ObjectUrl) -> RemoteName {
        RemoteName {
            url,
            store: StoreOptions {
                retries: crate::options::Retries::ByCaller,
                ..StoreOptions::default()
            },
            user: None,
            secrets: Secrets::default(),
            wait_timeout: None,
            on_failure: None,
            readahead_bytes: 1 << 20,
            connections: 8,
            block_bytes: 64 << 10,
            memory_bytes: 16 << 20,
            cache: None,
            cache_bytes: None,
            background_bytes: None,
            trace: None,
            record: None,
        }
    }

    /// The object that a file name names, if it is a URL of one.
    ///
    /// # Errors
    /// It is one, and broken.
    pub fn of_file_name(name: &str) -> Result<Option<RemoteName>> {
        let url = ObjectUrl::of_name(name).transpose()?;
        Ok(url.map(RemoteName::of_url))
    }

    /// Takes the object out of the options that describe it; `scheme` is the driver's.
    ///
    /// # Errors
    /// Something is missing, or cannot be.
    pub fn of_options(scheme: Scheme, options: &mut Options) -> Result<RemoteName> {
        let named = options.take("url").or(options.take("filename"));
        let named = named.ok_or_else(|| Error::invalid("Parameter 'url' is missing"))?;
        let url = ObjectUrl::of_name(&named).transpose()?;
        let of_scheme = url.filter(|url| url.scheme() == scheme);
        let scheme = scheme.name();
        let url = of_scheme.ok_or_else(|| {
            Error::invalid(format!(
                "{scheme} driver cannot handle the URL '{named}' (does not start with \
                 '{scheme}://')"
            ))
        })?;
        let mut name = RemoteName::of_url(url);
        name.read_store(options)?;
        name.read_work(options)?;
        Ok(name)
    }

    fn read_store(&mut self, options: &mut Options) -> Result<()> {
        if options.take_switch("sslverify")? == Some(false) {
            self.store.certificates = Certificates::Unchecked;
        }
        if let Some(timeout) = seconds(options, "timeout")? {
            self.store.timeout = timeout;
        }
        self.user = options.take("username");
        self.secrets.password = options.take("password-secret");
        self.secrets.cookie = options.take("cookie-secret");
        self.store.cookie = options.take("cookie").map(Zeroizing::new);
        if self.store.cookie.is_some() && self.secrets.cookie.is_some() {
            return Err(Error::invalid(
                "curl driver cannot handle both cookie and cookie secret",
            ));
        }
        if self.secrets.password.is_some() && self.user.is_none() {
            return Err(Error::invalid("'password-secret' needs 'username'"));
        }
        self.store.endpoint = options.take("endpoint");
        self.store.region = options.take("region");
        self.store.anonymous = options.take_switch("anonymous")?.unwrap_or(false);
        self.store.ca_file = options.take("ca-file").map(PathBuf::from);
        self.store.proxy = options.take("proxy");
        Ok(())
    }

    fn read_work(&mut self, options: &mut Options) -> Result<()> {
        self.wait_timeout = seconds(options, "wait-timeout")?;
        self.on_failure = match options.take("on-failure").as_deref() {
            None => None,
            Some("report") => Some(OnFailure::Report),
            Some("stop") => Some(OnFailure::Stop),
            Some(other) => {
                let text = format!("Parameter 'on-failure' does not accept value '{other}'");
                return Err(Error::invalid(text));
            }
        };
        if let Some(bytes) = options.take_size("readahead")? {
            self.readahead_bytes = bytes.min(64 << 20);
        }
        if let Some(text) = options.take("connections") {
            let number = text.parse().ok().filter(|number| (1..=64).contains(number));
            self.connections = number.ok_or_else(|| {
                Error::invalid("Parameter 'connections' expects a number between 1 and 64")
            })?;
        }
        if let Some(bytes) = options.take_size("block-size")? {
            if !bytes.is_power_of_two() || !(4096..=64 << 20).contains(&bytes) {
                let text = "'block-size' must be a power of two between 4k and 64M";
                return Err(Error::invalid(text));
            }
            self.block_bytes = bytes;
        }
        if let Some(bytes) = options.take_size("memory")? {
            self.memory_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        }
        self.cache = options.take("cache-dir").map(PathBuf::from);
        self.cache_bytes = options.take_size("cache-limit")?;
        self.trace = options.take("trace").map(PathBuf::from);
        self.background_bytes = options.take_size("background")?;
        Ok(())
    }
}

fn seconds(options: &mut Options, name: &str) -> Result<Option<Duration>> {
    let Some(text) = options.take(name) else {
        return Ok(None);
    };
    let seconds = text.parse::<u32>().ok().filter(|seconds| *seconds > 0);
    let seconds = seconds
        .ok_or_else(|| Error::invalid(format!("Parameter '{name}' expects a number of seconds")))?;
    Ok(Some(Duration::from_secs(seconds.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(scheme: Scheme, list: &str) -> Result<RemoteName> {
        let pairs = cowslip_block::options::split(list).unwrap();
        RemoteName::of_options(scheme, &mut Options::new(pairs))
    }

    #[test]
    fn options_are_those_of_the_table_and_wrong_values_are_named() {
        let name = read(
            Scheme::Https,
            "url=https://h/x,readahead=0,sslverify=off,timeout=7,username=me,password-secret=s,\
             cookie=a=b,wait-timeout=9,on-failure=stop,connections=2,block-size=1M,cache-dir=/c",
        )
        .unwrap();
        assert_eq!(name.store.timeout, Duration::from_secs(7));
        assert_eq!(name.store.certificates, Certificates::Unchecked);
        assert_eq!(name.secrets.password.as_deref(), Some("s"));
        assert_eq!(
            (name.readahead_bytes, name.block_bytes, name.connections),
            (0, 1 << 20, 2)
        );
        assert_eq!(name.on_failure, Some(OnFailure::Stop));
        for (list, why) in [
            ("timeout=1", "Parameter 'url' is missing"),
            (
                "url=http://h/x",
                "https driver cannot handle the URL 'http://h/x' (does not start with 'https://')",
            ),
            (
                "url=https://h/x,timeout=0",
                "Parameter 'timeout' expects a number of seconds",
            ),
            (
                "url=https://h/x,block-size=5000",
                "'block-size' must be a power of two between 4k and 64M",
            ),
            (
                "url=https://h/x,password-secret=s",
                "'password-secret' needs 'username'",
            ),
            (
                "url=https://h/x,on-failure=ignore",
                "Parameter 'on-failure' does not accept value 'ignore'",
            ),
            (
                "url=https://h/x,connections=0",
                "Parameter 'connections' expects a number between 1 and 64",
            ),
        ] {
            assert_eq!(read(Scheme::Https, list).unwrap_err().to_string(), why);
        }
    }
}
