//! Encrypted images as command lines have them: the options of their keys and of changing them, how
//! long opening a key slot shall take, and the fields of `info` on a LUKS header.

use std::sync::Arc;

use cowslip::luks::{
    CipherMode, ErasedKeys, Hash, Header, IvGenerator, KeyChange, KeyMaterial, KeySize, KeySlot,
    NewKey, NewVolume, Spec, VolumeOptions, iterations_run,
};
use cowslip::qcow2::create::Encryption;
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value, json};

use crate::error::CommandError;
use crate::open::{object, workers};

/// Time that opening a key slot takes on a machine like this one.
const ITER_TIME_DEFAULT_MS: u64 = 2000;
/// Iterations at least, however short that time is.
const ITERATIONS_MIN: u64 = 1000;
/// Iterations that are not exceeded here, so that every LUKS program opens what is made: see
/// `luks::Header::parse`.
const ITERATIONS_MAX: u64 = 1 << 27;
/// A measurement takes this long at least: the clock is finer, and the processor awake by then.
const MEASURED_NS: u64 = 10_000_000;

/// The options of keys in a list, which have a prefix there (`encrypt.`) or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyOptions {
    prefix: &'static str,
    secret: Option<String>,
    spec: Spec,
    hash: Hash,
    iter_time_ms: u64,
}

impl KeyOptions {
    /// Reads the options of a list, of which `value` finds the values by name.
    ///
    /// # Errors
    /// An algorithm that does not exist, or is not supported, by its name.
    pub fn parse<'a>(
        prefix: &'static str,
        value: impl Fn(&str) -> Option<&'a str>,
    ) -> Result<KeyOptions, CommandError> {
        let value = |name: &str| value(&format!("{prefix}{name}"));
        let key_size = find(
            "cipher-alg",
            value("cipher-alg").unwrap_or("aes-256"),
            &KeySize::ALL,
        )?;
        let modes = [("xts", CipherMode::Xts), ("cbc", CipherMode::Cbc)];
        let mode = find("cipher-mode", value("cipher-mode").unwrap_or("xts"), &modes)?;
        let vector_hash = value("ivgen-hash-alg").unwrap_or("sha256");
        let vector_hash = find("ivgen-hash-alg", vector_hash, &Hash::ALL)?;
        let generators = [
            ("plain", IvGenerator::Plain),
            ("plain64", IvGenerator::Plain64),
            ("essiv", IvGenerator::Essiv(vector_hash)),
        ];
        let iv = find(
            "ivgen-alg",
            value("ivgen-alg").unwrap_or("plain64"),
            &generators,
        )?;
        let spec = Spec { key_size, mode, iv };
        if !spec.is_possible() {
            let text = "ivgen-alg 'essiv' is supported with cipher-mode 'cbc' and a hash as long as a key of AES (sha256)";
            return Err(CommandError::new(text));
        }
        if (key_size, mode) == (KeySize::Aes192, CipherMode::Cbc) {
            // Its stripes fill no whole sectors, on which QEMU ends with an assertion.
            let text = "cipher-alg 'aes-192' is supported with cipher-mode 'xts' only";
            return Err(CommandError::new(text));
        }
        let iter_time = value("iter-time").map(|text| {
            let wrong =
                || CommandError::new(format!("Parameter '{prefix}iter-time' expects a number"));
            text.parse().map_err(|_| wrong())
        });
        Ok(KeyOptions {
            prefix,
            secret: value("key-secret").map(str::to_string),
            spec,
            hash: find(
                "hash-alg",
                value("hash-alg").unwrap_or("sha256"),
                &Hash::ALL,
            )?,
            iter_time_ms: iter_time.transpose()?.unwrap_or(ITER_TIME_DEFAULT_MS),
        })
    }

    /// Bytes that the header takes, with its key slots.
    ///
    /// # Errors
    /// There is no secret, without which no volume is made.
    pub fn header_bytes(&self) -> Result<u64, CommandError> {
        self.secret()?;
        Ok(NewVolume::bytes_before_data(&self.spec))
    }

    fn secret(&self) -> Result<&str, CommandError> {
        let secret = self.secret.as_deref();
        secret.ok_or_else(|| no_secret(self.prefix))
    }

    /// Makes a header, with a new master key in its first slot.
    ///
    /// # Errors
    /// There is no such secret, or the system has no random bytes.
    pub fn make(&self) -> Result<NewVolume, CommandError> {
        let passphrase = object::passphrase(self.secret()?)?;
        let per_ms = iterations_per_ms(self.hash, &self.spec);
        let options = VolumeOptions {
            spec: self.spec,
            hash: self.hash,
            passphrase,
            slot_iterations: iterations_within(per_ms, self.iter_time_ms),
            // Telling whether a key is the right one is not what keeps strangers out.
            digest_iterations: iterations_within(per_ms, self.iter_time_ms / 8),
        };
        let mut entropy = |bytes: &mut [u8]| fill_random(bytes);
        Ok(NewVolume::make(&options, &mut entropy)?)
    }
}

/// How a new qcow2 image shall be encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EncryptionOptions {
    /// QEMU's old way, under the secret of this ID.
    Aes {
        /// The ID, if one is named.
        secret: Option<String>,
    },
    /// LUKS, with its algorithms and the secret of the first key slot.
    Luks(KeyOptions),
}

impl EncryptionOptions {
    /// Bytes that the header takes, if there is one.
    ///
    /// # Errors
    /// As [`KeyOptions::header_bytes`].
    pub fn header_bytes(&self) -> Result<u64, CommandError> {
        match self {
            EncryptionOptions::Aes { .. } => Ok(0),
            EncryptionOptions::Luks(keys) => keys.header_bytes(),
        }
    }

    /// Makes the encryption.
    ///
    /// # Errors
    /// There is no such secret, or the system has no random bytes.
    pub fn make(&self) -> Result<Encryption, CommandError> {
        match self {
            EncryptionOptions::Aes { secret } => {
                // Nothing of it goes into the image, but who makes one has it.
                let secret = secret.as_deref().ok_or_else(|| no_secret("encrypt."))?;
                object::passphrase(secret)?;
                Ok(Encryption::Aes)
            }
            EncryptionOptions::Luks(keys) => keys.make().map(Box::new).map(Encryption::Luks),
        }
    }
}

fn no_secret(prefix: &str) -> CommandError {
    CommandError::new(format!(
        "Parameter '{prefix}key-secret' is required for cipher"
    ))
}

/// Changes of key slots by `amend`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotOptions {
    is_added: bool,
    new_secret: Option<String>,
    old_secret: Option<String>,
    slot: Option<u64>,
    iter_time_ms: Option<u64>,
}

impl SlotOptions {
    /// Reads the options of a list, of which `value` finds the values by name, without the prefix
    /// that they have there; texts are QEMU's.
    ///
    /// # Errors
    /// It is not said whether a key is added or erased, or what would belong to the other.
    pub fn parse<'a>(value: impl Fn(&str) -> Option<&'a str>) -> Result<SlotOptions, CommandError> {
        let refuse = |text: String| Err(CommandError::new(text));
        let number = |name: &str| {
            let wrong = || CommandError::new(format!("Parameter '{name}' expects a number"));
            let number = value(name).map(|text| text.parse::<i64>().map_err(|_| wrong()));
            number.transpose()
        };
        let is_added = match value("state") {
            Some("active") => true,
            Some("inactive") => false,
            None => return refuse("Parameter 'state' is missing".to_string()),
            Some(other) => {
                return refuse(format!("Parameter 'state' does not accept value '{other}'"));
            }
        };
        let without: &[&str] = match is_added {
            true => &["old-secret"],
            false => &["new-secret", "iter-time"],
        };
        if is_added && value("new-secret").is_none() {
            return refuse("'new-secret' is required to activate a keyslot".to_string());
        }
        if let Some(wrong) = without.iter().find(|name| value(name).is_some()) {
            let doing = if is_added { "activating" } else { "erasing" };
            return refuse(format!("'{wrong}' must not be given when {doing} keyslots"));
        }
        let slot = number("keyslot")?;
        let iter_time = number("iter-time")?;
        Ok(SlotOptions {
            is_added,
            new_secret: value("new-secret").map(str::to_string),
            old_secret: value("old-secret").map(str::to_string),
            // QEMU prints a negative one as the same 32 bits.
            slot: slot.map(|slot| u64::try_from(slot).unwrap_or(u64::from(slot as u32))),
            iter_time_ms: iter_time.map(|time| u64::try_from(time).unwrap_or(0)),
        })
    }

    /// The change of a volume that the secret of this ID opens.
    ///
    /// # Errors
    /// There is no such secret.
    pub fn change(
        &self,
        header: &Header,
        current: &str,
        force: bool,
    ) -> Result<KeyChange, CommandError> {
        let secret = |id: &Option<String>| id.as_deref().map(object::passphrase).transpose();
        let slot = self.slot;
        let Some(passphrase) = secret(&self.new_secret)? else {
            let passphrase = secret(&self.old_secret)?;
            return Ok(KeyChange::Erase(ErasedKeys {
                slot,
                passphrase,
                force,
            }));
        };
        let per_ms = iterations_per_ms(header.hash, &header.spec);
        let time_ms = self.iter_time_ms.unwrap_or(ITER_TIME_DEFAULT_MS);
        Ok(KeyChange::Add(NewKey {
            current: object::passphrase(current)?,
            passphrase,
            slot,
            iterations: iterations_within(per_ms, time_ms),
            force,
        }))
    }
}

/// Returns the means of changing keys.
pub fn means() -> KeyMaterial {
    KeyMaterial {
        random: Arc::new(fill_random),
        workers: workers(),
    }
}

/// The choice of a name.
fn find<T: Copy>(option: &str, name: &str, choices: &[(&str, T)]) -> Result<T, CommandError> {
    let found = choices.iter().find(|(its, _)| *its == name);
    found.map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        CommandError::new(format!(
            "Parameter '{option}' does not accept value '{name}' ({} are supported)",
            names.join(", ")
        ))
    })
}

fn fill_random(bytes: &mut [u8]) -> std::io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let len = rest.len();
        let got = getrandom(&mut *rest, GetRandomFlags::empty())?;
        rest = &mut rest[got.min(len)..];
    }
    Ok(())
}

/// Iterations that take about so long.
fn iterations_within(per_ms: u64, time_ms: u64) -> u32 {
    let iterations = per_ms.saturating_mul(time_ms);
    iterations.clamp(ITERATIONS_MIN, ITERATIONS_MAX) as u32
}

/// How many iterations this thread does in a millisecond; by its own time, since others want the
/// processor too.
fn iterations_per_ms(hash: Hash, spec: &Spec) -> u64 {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    };
    let mut iterations = ITERATIONS_MIN;
    loop {
        let start = now();
        iterations_run(hash, spec, iterations as u32);
        let spent_ns = now() - start;
        if spent_ns >= MEASURED_NS || iterations >= ITERATIONS_MAX {
            return (iterations * 1_000_000 / spent_ns.max(1)).max(1);
        }
        iterations *= 4;
    }
}

/// A header as in `info`, in QEMU's order; in an image of another format it says its own.
pub fn described(header: &Header, format: Option<&str>) -> Value {
    let name_of = |choices: &[(&'static str, KeySize)]| {
        let found = choices
            .iter()
            .find(|(_, size)| *size == header.spec.key_size);
        found.map_or("", |(name, _)| *name)
    };
    let (generator, vector_hash) = match header.spec.iv {
        IvGenerator::Plain => ("plain", None),
        IvGenerator::Plain64 => ("plain64", None),
        IvGenerator::Essiv(hash) => ("essiv", Some(hash.name())),
    };
    let mode = match header.spec.mode {
        CipherMode::Xts => "xts",
        CipherMode::Cbc => "cbc",
    };
    let mut out = Map::new();
    let mut put = |name: &str, value: Value| out.insert(name.to_string(), value);
    put("ivgen-alg", generator.into());
    put("detached-header", false.into());
    put("hash-alg", header.hash.name().into());
    put("cipher-alg", name_of(&KeySize::ALL).into());
    put("uuid", header.uuid.as_str().into());
    if let Some(hash) = vector_hash {
        put("ivgen-hash-alg", hash.into());
    }
    if let Some(format) = format {
        put("format", format.into());
    }
    put("cipher-mode", mode.into());
    put("slots", header.slots.iter().map(slot).collect());
    put("payload-offset", header.payload_offset.into());
    put("master-key-iters", header.digest_iterations.into());
    Value::Object(out)
}

fn slot(slot: &KeySlot) -> Value {
    match slot.active {
        true => json!({
            "active": true,
            "iters": slot.iterations,
            "key-offset": slot.key_offset,
            "stripes": KeySlot::STRIPES,
        }),
        false => json!({ "active": false, "key-offset": slot.key_offset }),
    }
}
