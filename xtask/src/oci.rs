//! `cargo xtask oci`: an image of the static command for Podman, Docker, containerd and the like,
//! by `contrib/oci/Containerfile`, made without any of them: a tar in the layout of the OCI image
//! specification (`oci-layout`, `index.json`, `blobs/sha256`). The same sources, and the same
//! certificates, make the same image.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Map, Value, json};

use crate::archive::Put;
use crate::install::Tree;
use crate::recipe::{self, Layer, Recipe};
use crate::{archive, musl, run, tree};

/// Options of `cargo xtask oci`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory for the image, and for the files that are in it
    #[arg(long, default_value = "target/oci")]
    out: PathBuf,
    /// PEM file of the certificates that the image trusts, for images on web servers
    #[arg(long, default_value = "/etc/ssl/certs/ca-certificates.crt")]
    certificates: PathBuf,
    #[command(flatten)]
    program: musl::Program,
}

/// The recipe, below the workspace's root.
const RECIPE: &str = "contrib/oci/Containerfile";

/// Types of what an image consists of, by the OCI image specification 1.0.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Builds the command if need be, and makes the image.
pub fn run(args: &Args) -> Result<(), String> {
    musl::require(&["strip", "gzip", "tar", "sha256sum"])?;
    if !args.certificates.is_file() {
        return Err(format!(
            "{} is not there (Debian's package ca-certificates); --certificates names another",
            args.certificates.display()
        ));
    }
    let path = run::root().join(RECIPE);
    let text = fs::read_to_string(&path).map_err(|e| format!("{RECIPE}: {e}"))?;
    let recipe = recipe::parse(&text).map_err(|e| format!("{RECIPE}: {e}"))?;
    let out = run::root().join(&args.out);
    let built = args.program.make(&out)?;
    fill(&out, &built, &args.certificates)?;
    let layout = out.join("layout");
    tree::remove(&layout)?;
    let image = Image {
        blobs: layout.join("blobs/sha256"),
    };
    tree::make(&image.blobs)?;
    image.write(&recipe, &out, &layout)?;
    archive::settle(&layout)?;
    let file = out.join(format!(
        "cowslip-{}-{}.oci.tar",
        env!("CARGO_PKG_VERSION"),
        architecture()
    ));
    archive::pack(&layout, Put::default(), &file)?;
    tree::remove(&layout)?;
    println!("{}", file.display());
    Ok(())
}

/// Makes the directories that the recipe copies.
fn fill(out: &Path, built: &Path, certificates: &Path) -> Result<(), String> {
    let root = out.join("root");
    tree::remove(&root)?;
    musl::fill(&Tree(root.join("usr")), built)?;
    let etc = Tree(root.join("etc"));
    etc.copy(certificates, "ssl/certs/ca-certificates.crt", 0o644)?;
    for parent in ["run", "var/lib"] {
        tree::make(&root.join(parent))?;
    }
    archive::settle(&root)?;
    for temporary in ["tmp", "var/tmp"] {
        directory(&root.join(temporary), 0o1777)?;
    }
    // Of the user that the image has: images, and sockets.
    for name in ["state", "sockets"] {
        tree::remove(&out.join(name))?;
        directory(&out.join(name).join("cowslip"), 0o750)?;
    }
    Ok(())
}

fn directory(path: &Path, mode: u32) -> Result<(), String> {
    tree::make(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(|e| format!("{}: {e}", path.display()))
}

/// The name of this machine's processors in images.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// An image that is being made.
struct Image {
    /// Directory of its parts, whose names are their sums.
    blobs: PathBuf,
}

impl Image {
    /// Writes layers, configuration, manifest and index.
    fn write(&self, recipe: &Recipe, from: &Path, layout: &Path) -> Result<(), String> {
        let mut layers = Vec::new();
        let mut sums = Vec::new();
        for layer in &recipe.layers {
            let tar = self.blobs.join("layer.tar");
            let put = Put {
                owner: layer.owner,
                below: &layer.to,
            };
            archive::pack(&from.join(&layer.from), put, &tar)?;
            sums.push(format!("sha256:{}", sum(&tar)?));
            layers.push(self.keep(LAYER, &archive::compress(&tar)?)?);
        }
        let config = self.keep_json(CONFIG, &configuration(recipe, &sums)?)?;
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers,
        });
        let mut manifest = self.keep_json(MANIFEST, &manifest)?;
        manifest["platform"] = json!({"architecture": architecture(), "os": "linux"});
        let version = env!("CARGO_PKG_VERSION");
        manifest["annotations"] = json!({"org.opencontainers.image.ref.name": version});
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [manifest]});
        write(&layout.join("index.json"), &index)?;
        let version = json!({"imageLayoutVersion": "1.0.0"});
        write(&layout.join("oci-layout"), &version)
    }

    /// Gives a part its name, and describes it.
    fn keep(&self, kind: &str, file: &Path) -> Result<Value, String> {
        let failed = |e: std::io::Error| format!("{}: {e}", file.display());
        let sum = sum(file)?;
        let size = file.metadata().map_err(failed)?.len();
        fs::rename(file, self.blobs.join(&sum)).map_err(failed)?;
        Ok(json!({"mediaType": kind, "digest": format!("sha256:{sum}"), "size": size}))
    }

    fn keep_json(&self, kind: &str, value: &Value) -> Result<Value, String> {
        let file = self.blobs.join("part.json");
        write(&file, value)?;
        self.keep(kind, &file)
    }
}

fn write(file: &Path, value: &Value) -> Result<(), String> {
    fs::write(file, value.to_string()).map_err(|e| format!("{}: {e}", file.display()))
}

/// The SHA-256 of a file, in hexadecimal digits.
fn sum(file: &Path) -> Result<String, String> {
    let said = run::output(Command::new("sha256sum").arg("-b").arg(file))?;
    let sum = said.split_whitespace().next().unwrap_or_default();
    match sum.len() {
        64 => Ok(sum.to_string()),
        _ => Err(format!("sha256sum of {}: {said}", file.display())),
    }
}

/// How a container of the image is run, and the sums of its layers before compression.
fn configuration(recipe: &Recipe, sums: &[String]) -> Result<Value, String> {
    let mut date = Command::new("date");
    date.args(["-u", "+%Y-%m-%dT%H:%M:%SZ", "-d"]);
    let created = run::output(date.arg(format!("@{}", run::epoch())))?;
    let created = created.trim();
    let volumes = recipe.volumes.iter();
    let volumes: Map<String, Value> = volumes.map(|one| (one.clone(), json!({}))).collect();
    let mut labels = recipe.labels.clone();
    let version = env!("CARGO_PKG_VERSION").to_string();
    labels.insert("org.opencontainers.image.version".into(), version);
    let history = recipe.layers.iter().map(|layer| {
        let Layer { from, to, owner } = layer;
        let copied = format!("COPY --chown={owner}:{owner} {from}/ /{to}");
        json!({"created": created, "created_by": copied})
    });
    Ok(json!({
        "created": created,
        "architecture": architecture(),
        "os": "linux",
        "config": {
            "User": recipe.user,
            "Env": recipe.environment,
            "Entrypoint": recipe.entrypoint,
            "Cmd": recipe.command,
            "Volumes": volumes,
            "WorkingDir": recipe.directory,
            "Labels": labels,
            "StopSignal": recipe.stop_signal,
        },
        "rootfs": {"type": "layers", "diff_ids": sums},
        "history": history.collect::<Vec<Value>>(),
    }))
}
