//! [`RbdName`]: an image in a pool of a cluster, and how the cluster is reached; as a file name and
//! as options, by QEMU's names.

use std::time::Duration;

use cowslip_block::file::Storage;
use cowslip_block::options::Kind::{Number, Text};
use cowslip_block::options::{OptionEntry, Options, Pairs, option};
use cowslip_block::{Error, Result};

/// The options of `driver=rbd`.
#[rustfmt::skip] // An option a line.
pub const OPTIONS: &[OptionEntry] = &[
    option("pool", Text, "", "Name of the pool"),
    option("namespace", Text, "", "Namespace in the pool"),
    option("image", Text, "", "Name of the image"),
    option("snapshot", Text, "", "Snapshot to read, by its name; empty for the image itself"),
    option("conf", Text, "", "File of Ceph's settings; the usual ones if none is named"),
    option("user", Text, "admin", "Ceph's user"),
    option("key-secret", Text, "", "ID of the secret that is the user's key"),
    option(
        "auth-client-required.",
        Text,
        "",
        "Ways of authentication, by their numbers: cephx or none",
    ),
    option("server.", Text, "", "Addresses of monitors: server.0.host, server.0.port, and so on"),
    option(
        "wait-timeout",
        Number,
        "",
        "Seconds that requests wait for the cluster; for ever if not given",
    ),
];

/// Settings of Ceph in a file name by which an image may not have files of the host read or
/// written: none of these names one.
const HARMLESS: &[&str] = &["mon_host", "auth_client_required", "auth_supported", "key"];

/// An image in RBD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RbdName {
    /// The pool.
    pub pool: String,
    /// The namespace in it; empty for the usual one.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// The snapshot of it, if it is one.
    pub snapshot: Option<String>,
    /// The file of Ceph's settings; the usual ones if none is named.
    pub conf: Option<String>,
    /// Ceph's user without `client.`; `admin` if none is named.
    pub user: Option<String>,
    /// The secret that is the user's key, by its ID.
    pub key_secret: Option<String>,
    /// Time that requests wait for the cluster, if it is bounded.
    pub wait_timeout: Option<Duration>,
    /// Other settings of Ceph, in their order.
    pub settings: Pairs,
}

impl RbdName {
    /// The image of a file name, `rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT][:SETTING=VALUE…]`, where a
    /// backslash takes the meaning from what follows it; `None` if it is none of these.
    ///
    /// # Errors
    /// It is one, and not whole.
    pub fn of_file_name(name: &str) -> Result<Option<RbdName>> {
        let Some(rest) = name.strip_prefix("rbd:") else {
            return Ok(None);
        };
        let wrong = |what: &str| Error::invalid(what);
        let (place, mut rest) = cut(rest, ':');
        let (pool, Some(image)) = cut(place, '/') else {
            return Err(wrong("Pool name is required, as in rbd:POOL/IMAGE"));
        };
        let (image, snapshot) = cut(image, '@');
        let (namespace, image) = match cut(image, '/') {
            (namespace, Some(image)) => (namespace, image),
            (image, None) => ("", image),
        };
        let mut found = RbdName {
            pool: plain(pool),
            namespace: plain(namespace),
            image: plain(image),
            snapshot: snapshot.map(plain).filter(|name| !name.is_empty()),
            ..RbdName::default()
        };
        while let Some(list) = rest {
            let (setting, after) = cut(list, ':');
            rest = after;
            let (option, value) = match cut(setting, '=') {
                (option, Some(value)) => (plain(option), plain(value)),
                (option, None) => {
                    let option = plain(option);
                    return Err(wrong(&format!("conf option {option} has no value")));
                }
            };
            match option.as_str() {
                "conf" => found.conf = Some(value),
                "id" => found.user = Some(value),
                _ => found.settings.push((option, value)),
            }
        }
        found.check().map(Some)
    }

    /// Takes the image out of the options that describe it.
    ///
    /// # Errors
    /// Something is missing or of the wrong kind.
    pub fn of_options(options: &mut Options) -> Result<RbdName> {
        let mut needed = |name: &str| {
            let missing = || Error::invalid(format!("Parameter '{name}' is missing"));
            options.take(name).ok_or_else(missing)
        };
        let (pool, image) = (needed("pool")?, needed("image")?);
        let mut settings = Pairs::new();
        let ways = options.take_group("auth-client-required.");
        if !ways.is_empty() {
            let ways: Vec<String> = ways.into_iter().map(|(_, way)| way).collect();
            settings.push(("auth_client_required".into(), ways.join(";")));
        }
        let servers = servers(options.take_group("server."))?;
        if !servers.is_empty() {
            settings.push(("mon_host".into(), servers.join(",")));
        }
        let seconds = options.take("wait-timeout").map(|text| {
            let seconds = text.parse::<u32>().ok().filter(|seconds| *seconds > 0);
            let wrong = || Error::invalid("Parameter 'wait-timeout' expects a number above 0");
            seconds.ok_or_else(wrong)
        });
        let wait_timeout = seconds.transpose()?;
        let found = RbdName {
            pool,
            image,
            namespace: options.take("namespace").unwrap_or_default(),
            snapshot: options.take("snapshot").filter(|name| !name.is_empty()),
            conf: options.take("conf"),
            user: options.take("user"),
            key_secret: options.take("key-secret"),
            wait_timeout: wait_timeout.map(|seconds| Duration::from_secs(seconds.into())),
            settings,
        };
        found.check()
    }

    fn check(self) -> Result<RbdName> {
        for (what, name) in [("a pool", &self.pool), ("an image", &self.image)] {
            if name.is_empty() {
                let text = format!("The name of {what} in RBD is empty");
                return Err(Error::invalid(text));
            }
        }
        let texts = [&self.pool, &self.namespace, &self.image].into_iter();
        let texts = texts
            .chain(&self.snapshot)
            .chain(&self.conf)
            .chain(&self.user);
        let pairs = self.settings.iter().flat_map(|(name, value)| [name, value]);
        let has_zero = texts.chain(pairs).any(|text| text.contains('\0'));
        match has_zero {
            true => Err(Error::invalid("A name in RBD has a zero byte")),
            false => Ok(self),
        }
    }

    /// Its file name, without the settings whose values are secret.
    pub fn file_name(&self) -> String {
        let in_place = |text: &str| escaped(text, &['/', '@', ':']);
        let mut name = format!("rbd:{}/", in_place(&self.pool));
        if !self.namespace.is_empty() {
            name += &in_place(&self.namespace);
            name.push('/');
        }
        name += &in_place(&self.image);
        if let Some(snapshot) = &self.snapshot {
            name.push('@');
            name += &in_place(snapshot);
        }
        let own = [("conf", &self.conf), ("id", &self.user)];
        let own = own
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_ref()?)));
        let others = self
            .settings
            .iter()
            .map(|(name, value)| (name.as_str(), value));
        for (option, value) in own.chain(others.filter(|(name, _)| *name != "key")) {
            let option = escaped(option, &['=', ':', '@']);
            // QEMU looks for a snapshot in the values, too.
            name += &format!(":{option}={}", escaped(value, &[':', '@']));
        }
        name
    }

    /// The place of its bytes, by its name: a snapshot is another one than its image, whose writes
    /// do not change it.
    pub fn storage(&self) -> Storage {
        let mon_host = self.settings.iter().find(|(name, _)| name == "mon_host");
        let cluster = mon_host.map(|(_, hosts)| hosts).or(self.conf.as_ref());
        let place = [&self.pool, &self.namespace, &self.image];
        let snapshot = self.snapshot.as_deref().unwrap_or_default();
        Storage::named(&format!("rbd:{cluster:?}{place:?}@{snapshot}"))
    }

    /// An option by which files of the host are read as settings, but for those of the system, or
    /// written, if it has one: a log, a socket, modules.
    pub fn reaches_files_by(&self) -> Option<&'static str> {
        let is_harmless = |name: &String| {
            let name = name.replace([' ', '-'], "_");
            HARMLESS.contains(&name.as_str())
        };
        // Others than the administrator may have written one that is elsewhere: a guest its disk.
        let is_of_system = |path: &str| path.starts_with("/etc/ceph/") && !path.contains("..");
        match self.conf.as_deref().filter(|path| !is_of_system(path)) {
            Some(_) => Some("conf"),
            None if self.settings.iter().all(|(name, _)| is_harmless(name)) => None,
            None => Some("SETTING=VALUE"),
        }
    }

    /// Its pool with the namespace, and its image with the snapshot, for people.
    pub(crate) fn place(&self) -> (String, String) {
        let pool = match self.namespace.is_empty() {
            true => self.pool.clone(),
            false => format!("{}/{}", self.pool, self.namespace),
        };
        (pool, self.image.clone())
    }
}

/// Addresses out of `0.host`, `0.port`, and so on, in the order of their numbers.
fn servers(options: Pairs) -> Result<Vec<String>> {
    let mut found: Vec<(u32, Option<String>, Option<String>)> = Vec::new();
    for (name, value) in options {
        let unknown = || Error::invalid(format!("Invalid parameter 'server.{name}'"));
        let (number, part) = name.split_once('.').ok_or_else(unknown)?;
        let number: u32 = number.parse().map_err(|_| unknown())?;
        let at = found.iter().position(|(known, ..)| *known == number);
        let at = at.unwrap_or_else(|| {
            found.push((number, None, None));
            found.len() - 1
        });
        match part {
            "host" => found[at].1 = Some(value),
            "port" => found[at].2 = Some(value),
            "type" if value == "inet" => {}
            _ => return Err(unknown()),
        }
    }
    found.sort_by_key(|(number, ..)| *number);
    let address = |(number, host, port): (u32, Option<String>, Option<String>)| {
        let missing = || Error::invalid(format!("Parameter 'server.{number}.host' is missing"));
        let host = host.ok_or_else(missing)?;
        let host = match host.contains(':') && !host.starts_with('[') {
            true => format!("[{host}]"),
            false => host,
        };
        Ok(port.map_or(host.clone(), |port| format!("{host}:{port}")))
    };
    found.into_iter().map(address).collect()
}

/// The text before the first of this character that no backslash precedes, and that after it.
fn cut(text: &str, end: char) -> (&str, Option<&str>) {
    let mut is_escaped = false;
    for (at, character) in text.char_indices() {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if character == end => return (&text[..at], Some(&text[at + end.len_utf8()..])),
            _ => {}
        }
    }
    (text, None)
}

/// A text without its backslashes, but for those that one precedes.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => plain.extend(characters.next()),
            other => plain.push(other),
        }
    }
    plain
}

/// A text with backslashes before what has a meaning in its place.
fn escaped(text: &str, meant: &[char]) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if character == '\\' || meant.contains(&character) {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // In a test a panic is the report.

    use super::*;

    fn named(name: &str) -> RbdName {
        RbdName::of_file_name(name).unwrap().unwrap()
    }

    #[test]
    fn names_are_read_as_qemu_reads_them() {
        let whole = named(r"rbd:po\:ol/name\/space/im\@age@sn\\ap:id=me:conf=/a\:b:mon_host=h\:1");
        assert_eq!(whole.pool, "po:ol");
        assert_eq!(whole.namespace, "name/space");
        assert_eq!(whole.image, "im@age");
        assert_eq!(whole.snapshot.as_deref(), Some(r"sn\ap"));
        assert_eq!(whole.user.as_deref(), Some("me"));
        assert_eq!(whole.conf.as_deref(), Some("/a:b"));
        assert_eq!(whole.settings, [("mon_host".into(), "h:1".into())]);
        let short = named("rbd:pool/image");
        assert_eq!((&short.pool[..], &short.image[..]), ("pool", "image"));
        assert_eq!(short.snapshot, None);
        // An address in a setting is no snapshot.
        assert_eq!(named("rbd:pool/image:key=a@b/c==").image, "image");
        assert_eq!(RbdName::of_file_name("pool/image").unwrap(), None);
    }

    #[test]
    fn a_name_is_read_back_as_what_it_was() {
        for name in [
            "rbd:pool/image",
            "rbd:pool/space/image@snap",
            r"rbd:p\:q/i\@j@s\/t:conf=/etc/x=y:id=me:mon_host=a\:1,b",
        ] {
            let read = named(name);
            assert_eq!(read.file_name(), name);
        }
        let secret = named("rbd:pool/image:key=SECRET").file_name();
        assert_eq!(secret, "rbd:pool/image");
    }

    #[test]
    fn names_that_are_not_whole_are_refused() {
        for (name, why) in [
            ("rbd:image", "Pool name is required"),
            ("rbd:", "Pool name is required"),
            ("rbd:/image", "name of a pool"),
            ("rbd:pool/", "name of an image"),
            ("rbd:pool/image:conf", "conf option conf has no value"),
            ("rbd:pool/im\0age", "zero byte"),
        ] {
            let error = RbdName::of_file_name(name).unwrap_err().to_string();
            assert!(error.contains(why), "{name}: {error}");
        }
    }

    #[test]
    fn monitors_are_in_the_order_of_their_numbers() {
        let pairs = [
            ("pool", "p"),
            ("image", "i"),
            ("server.1.host", "::1"),
            ("server.1.port", "6789"),
            ("server.0.host", "mon"),
            ("auth-client-required.0", "cephx"),
            ("wait-timeout", "7"),
        ];
        let pairs = pairs.map(|(name, value)| (name.to_string(), value.to_string()));
        let mut options = Options::new(pairs.into());
        let read = RbdName::of_options(&mut options).unwrap();
        let settings = [
            ("auth_client_required", "cephx"),
            ("mon_host", "mon,[::1]:6789"),
        ];
        let settings = settings.map(|(name, value)| (name.to_string(), value.to_string()));
        assert_eq!(read.settings, settings);
        assert_eq!(read.wait_timeout, Some(Duration::from_secs(7)));
        assert!(options.into_pairs().is_empty());
    }

    #[test]
    fn images_choose_no_files_of_the_host() {
        for (name, option) in [
            ("rbd:p/i", None),
            ("rbd:p/i:id=me:mon_host=a:key=x", None),
            ("rbd:p/i:mon host=a", None),
            ("rbd:p/i:conf=/etc/ceph/other.conf", None),
            ("rbd:p/i:conf=/tmp/x", Some("conf")),
            ("rbd:p/i:conf=/etc/ceph/../../tmp/x", Some("conf")),
            ("rbd:p/i:log_file=/etc/passwd", Some("SETTING=VALUE")),
            ("rbd:p/i:plugin_dir=/tmp", Some("SETTING=VALUE")),
        ] {
            assert_eq!(named(name).reaches_files_by(), option, "{name}");
        }
    }
}
