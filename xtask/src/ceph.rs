//! `cargo xtask ceph`: a cluster of one node, and the command on images in it.
//!
//! The cluster is a monitor and an OSD, whose store is in memory, on ports of this machine and with
//! settings of its own in a scratch directory. All of it goes at the end.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cowslip_testbed::Random;
use rustix::process::{Pid, Signal, kill_process};

use crate::{apt, run};

#[derive(clap::Args)]
pub struct Args {
    /// A directory for the cluster, which stays there and goes on running
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// The command, in place of a build of its own
    #[arg(long, value_name = "FILE")]
    cowslip: Option<PathBuf>,
}

/// Programs, with Debian's packages for them.
const PROGRAMS: &[(&str, &str)] = &[
    ("ceph-mon", "ceph-mon"),
    ("ceph-osd", "ceph-osd"),
    ("ceph", "ceph-common"),
    ("rbd", "ceph-common"),
    ("ceph-authtool", "ceph-common"),
    ("monmaptool", "ceph-common"),
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
];

/// Bytes of the golden image.
const GOLDEN: u64 = 64 << 20;

/// Starts a cluster without and one with authentication, and tries the command on it.
///
/// # Errors
/// Something is missing; or the command does not do what it should, or Ceph does not start.
pub fn run(args: &Args) -> Result<(), String> {
    ensure()?;
    let cowslip = match &args.cowslip {
        Some(path) => fs::canonicalize(path).map_err(|e| format!("{}: {e}", path.display()))?,
        None => {
            run::run(run::cargo().args(["build", "--bin", "cowslip"]))?;
            run::target().join("debug/cowslip")
        }
    };
    let has_qemu = has_qemus_driver();
    for security in [Security::None, Security::Cephx] {
        println!("xtask: a cluster {}", security.words());
        let scratch = match &args.keep {
            Some(directory) => directory.join(security.name()),
            None => run::target().join(format!("ceph-{}", std::process::id())),
        };
        let cluster = Cluster::start(&scratch, security)?;
        let trial = Trial {
            cluster: &cluster,
            cowslip: &cowslip,
            has_qemu,
        };
        let outcome = trial.run();
        if args.keep.is_some() {
            println!("xtask: stays: ceph -c {} -s", cluster.conf().display());
            std::mem::forget(cluster);
        }
        outcome?;
    }
    Ok(())
}

/// Installs what is missing where that is possible.
fn ensure() -> Result<(), String> {
    let missing = || {
        let programs = PROGRAMS.iter();
        let mut missing: Vec<_> = programs
            .filter(|(program, _)| run::find_program(program).is_none())
            .collect();
        missing.dedup_by_key(|(_, package)| *package);
        missing
    };
    let may_install = rustix::process::geteuid().is_root()
        && run::find_program("apt-get").is_some()
        && std::env::var_os("COWSLIP_NO_INSTALL").is_none();
    if !missing().is_empty() && may_install {
        apt::update()?;
        for (_, package) in missing() {
            if let Err(message) = apt::install(package) {
                println!("xtask: {message}");
            }
        }
    }
    let missing: Vec<String> = missing()
        .iter()
        .map(|(program, package)| format!("{program} (Debian: {package})"))
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!("cannot run, missing: {}", missing.join(", "))),
    }
}

/// Whether QEMU has its own driver for RBD; says so if not.
fn has_qemus_driver() -> bool {
    let asked = Command::new("qemu-img").args(["info", "rbd:x"]).output();
    let has = asked
        .is_ok_and(|asked| !String::from_utf8_lossy(&asked.stderr).contains("Unknown protocol"));
    if !has {
        println!("xtask: missing: QEMU's driver rbd (Debian: qemu-block-extra); not compared");
    }
    has
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Security {
    None,
    Cephx,
}

impl Security {
    fn name(self) -> &'static str {
        match self {
            Security::None => "none",
            Security::Cephx => "cephx",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Security::None => "without authentication",
            Security::Cephx => "with cephx",
        }
    }
}

/// A daemon in the foreground, killed with this.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A cluster that is running; it ends, and its directory is removed, with this.
struct Cluster {
    directory: PathBuf,
    security: Security,
    // The OSD ends first.
    daemons: Vec<Daemon>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.daemons.clear();
        drop(fs::remove_dir_all(&self.directory));
    }
}

fn written(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

/// Two ports that nobody listens on.
fn free_ports() -> std::io::Result<(u16, u16)> {
    let listen = || TcpListener::bind("127.0.0.1:0");
    let (one, other) = (listen()?, listen()?);
    Ok((one.local_addr()?.port(), other.local_addr()?.port()))
}

impl Cluster {
    fn start(directory: &Path, security: Security) -> Result<Cluster, String> {
        drop(fs::remove_dir_all(directory));
        for name in ["mon", "osd", "run"] {
            let path = directory.join(name);
            fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        }
        let directory = fs::canonicalize(directory).map_err(|e| e.to_string())?;
        let mut cluster = Cluster {
            directory,
            security,
            daemons: Vec::new(),
        };
        let uuid = || fs::read_to_string("/proc/sys/kernel/random/uuid").map_err(|e| e.to_string());
        let (fsid, osd) = (uuid()?.trim().to_string(), uuid()?.trim().to_string());
        let (new, old) = free_ports().map_err(|e| e.to_string())?;
        let address = format!("[v2:127.0.0.1:{new},v1:127.0.0.1:{old}]");
        cluster.configure(&fsid, &address)?;
        if security == Security::Cephx {
            cluster.make_keys()?;
        }
        let begun = cluster.begin((&fsid, &osd), &address);
        begun.map_err(|error| format!("{error}{}", cluster.ended()))?;
        Ok(cluster)
    }

    fn begin(&mut self, (fsid, osd): (&str, &str), address: &str) -> Result<(), String> {
        self.start_monitor(fsid, address)?;
        self.start_osd(osd)?;
        self.ceph(&["osd", "pool", "create", "rbd", "8", "8"])?;
        self.ceph(&["osd", "pool", "application", "enable", "rbd", "rbd"])?;
        Ok(())
    }

    /// How daemons have ended that have.
    fn ended(&mut self) -> String {
        let daemons = self.daemons.iter_mut();
        let ended = daemons.filter_map(|daemon| daemon.0.try_wait().ok().flatten());
        ended
            .map(|status| format!("; a daemon has ended: {status}"))
            .collect()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn conf(&self) -> PathBuf {
        self.path("ceph.conf")
    }

    fn configure(&self, fsid: &str, address: &str) -> Result<(), String> {
        let at = self.directory.display();
        let security = self.security.name();
        let text = format!(
            "[global]\n\
             fsid = {fsid}\n\
             mon_host = {address}\n\
             public_network = 127.0.0.0/8\n\
             auth_cluster_required = {security}\n\
             auth_service_required = {security}\n\
             auth_client_required = {security}\n\
             keyring = {at}/keyring\n\
             run_dir = {at}/run\n\
             admin_socket = {at}/run/$name.asok\n\
             log_file = {at}/$name.log\n\
             mon_data = {at}/mon\n\
             osd_data = {at}/osd\n\
             osd_objectstore = memstore\n\
             memstore_device_bytes = 1073741824\n\
             osd_pool_default_size = 1\n\
             osd_pool_default_min_size = 1\n\
             osd_crush_chooseleaf_type = 0\n\
             mon_allow_pool_size_one = true\n\
             mon_data_avail_crit = 0\n\
             mon_data_avail_warn = 0\n\
             [client]\n\
             admin_socket =\n\
             log_file =\n"
        );
        written(&self.conf(), &text)
    }

    /// Keys of the monitor and of the user `admin`, in one file.
    fn make_keys(&self) -> Result<(), String> {
        for (create, name, caps) in [
            (true, "mon.", &["mon", "allow *"][..]),
            (
                false,
                "client.admin",
                &["mon", "allow *", "osd", "allow *"][..],
            ),
        ] {
            let mut command = Command::new("ceph-authtool");
            if create {
                command.arg("--create-keyring");
            }
            command
                .arg(self.path("keyring"))
                .args(["--gen-key", "-n", name]);
            for cap in caps.chunks(2) {
                command.arg("--cap").args(cap);
            }
            run::output(&mut command)?;
        }
        Ok(())
    }

    /// A program of Ceph's with the settings of the cluster.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        command.arg("-c").arg(self.conf());
        command.env_remove("CEPH_ARGS").env_remove("CEPH_CONF");
        command
    }

    fn ceph(&self, words: &[&str]) -> Result<String, String> {
        let mut command = self.program("ceph");
        run::output(command.args(["--connect-timeout", "30"]).args(words))
    }

    fn rbd(&self, words: &[&str]) -> Result<String, String> {
        run::output(self.program("rbd").args(words))
    }

    /// Starts a daemon in the foreground.
    fn daemon(&self, name: &str, id: &str) -> Result<Daemon, String> {
        let mut command = self.program(name);
        command.args(["-f", "-i", id]);
        let output = fs::File::create(self.path(&format!("{name}.output")));
        let output = output.map_err(|e| e.to_string())?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(output);
        let child = command.spawn();
        child
            .map(Daemon)
            .map_err(|e| format!("cannot run {}: {e}", run::describe(&command)))
    }

    fn start_monitor(&mut self, fsid: &str, address: &str) -> Result<(), String> {
        let map = self.path("monmap");
        let mut command = Command::new("monmaptool");
        command.args(["--create", "--fsid", fsid, "--addv", "a", address]);
        command.args(["--set-min-mon-release", "16"]).arg(&map);
        run::output(&mut command)?;
        let mut command = self.program("ceph-mon");
        command
            .args(["-i", "a", "--mkfs", "--fsid", fsid, "--monmap"])
            .arg(&map);
        if self.security == Security::Cephx {
            command.arg("--keyring").arg(self.path("keyring"));
        }
        run::output(&mut command)?;
        let monitor = self.daemon("ceph-mon", "a")?;
        self.daemons.insert(0, monitor);
        Ok(())
    }

    fn start_osd(&mut self, uuid: &str) -> Result<(), String> {
        let mut command = self.program("ceph");
        command.args(["--connect-timeout", "60", "osd", "new", uuid]);
        run::output(&mut command)?;
        let mut command = self.program("ceph-osd");
        command.args(["-i", "0", "--mkfs", "--osd-uuid", uuid]);
        if self.security == Security::Cephx {
            // The OSD's own key, made by the monitor.
            let profile = [
                "mon",
                "allow profile osd",
                "osd",
                "allow *",
                "mgr",
                "allow profile osd",
            ];
            let key = self.ceph(&[&["auth", "get-or-create", "osd.0"], &profile[..]].concat())?;
            written(&self.path("osd/keyring"), &key)?;
            command.arg("--keyring").arg(self.path("osd/keyring"));
        }
        run::output(&mut command)?;
        self.resume_osd()?;
        self.ceph(&[
            "osd",
            "crush",
            "add",
            "osd.0",
            "1.0",
            "root=default",
            "host=here",
        ])?;
        Ok(())
    }

    /// Starts the OSD, first in the list, with what it has stored.
    fn resume_osd(&mut self) -> Result<(), String> {
        let mut command = self.program("ceph-osd");
        command.args(["-f", "-i", "0"]);
        if self.security == Security::Cephx {
            command.arg("--keyring").arg(self.path("osd/keyring"));
        }
        let output = fs::File::create(self.path("ceph-osd.output")).map_err(|e| e.to_string())?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(output);
        let child = command.spawn();
        let osd = child.map_err(|e| format!("cannot run {}: {e}", run::describe(&command)))?;
        self.daemons.insert(0, Daemon(osd));
        let begun = Instant::now();
        while !self.ceph(&["osd", "stat"])?.contains("1 up") {
            if begun.elapsed() > Duration::from_secs(60) {
                let log = fs::read_to_string(self.path("ceph-osd.output")).unwrap_or_default();
                return Err(format!("the OSD does not start: {log}"));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Has the OSD stand still, or go on.
    fn signal_osd(&self, signal: Signal) -> Result<(), String> {
        let osd = self.daemons.first().ok_or("there is no OSD")?;
        kill_process(Pid::from_child(&osd.0), signal).map_err(|e| e.to_string())
    }
}

/// A part of a trial.
type Step<'a> = fn(&Trial<'a>) -> Result<(), String>;

/// The command on images of a cluster.
struct Trial<'a> {
    cluster: &'a Cluster,
    cowslip: &'a Path,
    has_qemu: bool,
}

/// Says that a check has passed.
fn passed(what: &str, begun: Instant) {
    println!("  {what} ({:.1} s)", begun.elapsed().as_secs_f64());
}

impl Trial<'_> {
    fn command(&self, program: &Path, line: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.cluster.directory);
        command.env("CEPH_CONF", self.cluster.conf());
        command
            .env_remove("CEPH_ARGS")
            .env_remove("COWSLIP_REMOTE_TIMEOUT");
        command.args(line.split(' ').map(|word| word.replace("__", " ")));
        command
    }

    fn ours(&self, line: &str) -> Result<String, String> {
        run::output(&mut self.command(self.cowslip, line))
    }

    fn refused(&self, line: &str, words: &str) -> Result<(), String> {
        match self.ours(line) {
            Err(text) if text.contains(words) => Ok(()),
            Err(text) => Err(format!("{line}: not '{words}' but {text}")),
            Ok(_) => Err(format!("{line}: is not refused")),
        }
    }

    fn qemu(&self, program: &str, line: &str) -> Result<(), String> {
        match self.has_qemu {
            true => run::output(&mut self.command(Path::new(program), line)).map(drop),
            false => Ok(()),
        }
    }

    /// Compares an image with a local file, by what `rbd export` and QEMU read of it.
    fn same(&self, image: &str, local: &str) -> Result<(), String> {
        let at = |name: &str| self.cluster.path(name).display().to_string();
        self.cluster
            .rbd(&["export", "--no-progress", image, &at("exported")])?;
        let same = run::output(Command::new("cmp").args([at("exported"), at(local)]));
        same.map_err(|text| format!("{image} is not {local}: {text}"))?;
        drop(fs::remove_file(at("exported")));
        self.qemu(
            "qemu-img",
            &format!("compare -f raw -F raw {local} rbd:{image}"),
        )?;
        self.ours(&format!("compare -f raw -F raw {local} rbd:{image}"))?;
        Ok(())
    }

    fn run(&self) -> Result<(), String> {
        let steps: [(&str, Step<'_>); 7] = [
            (
                "a golden image, converted, exported and compared",
                Self::golden,
            ),
            (
                "an overlay on its snapshot, served while the OSD pauses",
                Self::served,
            ),
            ("writes, zeroes, discards and resizes", Self::written),
            ("qcow2 in RBD, checked by both", Self::formatted),
            ("names, options and namespaces", Self::named),
            ("what is missing, in words", Self::missing),
            ("a cluster that does not answer", Self::silent),
        ];
        for (what, step) in steps {
            let begun = Instant::now();
            step(self).map_err(|error| format!("{what}: {error}"))?;
            passed(what, begun);
        }
        Ok(())
    }

    fn golden(&self) -> Result<(), String> {
        // A third is data, the rest is holes.
        let mut random = Random::new(28);
        let mut bytes = vec![0; GOLDEN as usize];
        for chunk in bytes.chunks_mut(1 << 20).step_by(3) {
            chunk
                .iter_mut()
                .for_each(|byte| *byte = random.below(256) as u8);
        }
        let local = self.cluster.path("golden.raw");
        fs::write(&local, &bytes).map_err(|e| e.to_string())?;
        self.ours("convert -f raw -O raw golden.raw rbd:rbd/golden")?;
        self.same("rbd/golden", "golden.raw")?;
        self.cluster.rbd(&["snap", "create", "rbd/golden@v1"])?;
        self.ours("convert -f raw -O qcow2 rbd:rbd/golden@v1 local.qcow2")?;
        self.ours("compare -F raw local.qcow2 golden.raw")?;
        // Into one that exists, with less data: what was there is gone, and holes are there. The
        // first sector of a raw image is written in any case.
        self.cluster
            .rbd(&["create", "--size", "64M", "rbd/exists"])?;
        self.ours("create -q -f raw empty.raw 64M")?;
        self.ours("convert -f raw -O raw golden.raw rbd:rbd/exists")?;
        self.ours("convert -f raw -O raw empty.raw rbd:rbd/exists")?;
        self.same("rbd/exists", "empty.raw")?;
        let map = self.ours("map --output=json -f raw rbd:rbd/exists")?;
        match map.matches("\"data\": true").count() {
            0 | 1 => Ok(()),
            _ => Err(format!("data in an image of zeroes: {map}")),
        }
    }

    fn served(&self) -> Result<(), String> {
        self.ours("create -q -f qcow2 -b rbd:rbd/golden@v1 -F raw vm.qcow2")?;
        let mut command = self.command(self.cowslip, "serve --pid-file pid -k socket vm.qcow2");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut server = Daemon(command.spawn().map_err(|e| e.to_string())?);
        let begun = Instant::now();
        while !self.cluster.path("pid").exists() || !self.cluster.path("socket").exists() {
            if begun.elapsed() > Duration::from_secs(30) {
                return Err("the server does not start".to_string());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let uri = format!(
            "nbd+unix:///?socket={}",
            self.cluster.path("socket").display()
        );
        self.ours(&format!(
            "io -f raw -c write__-P__7__4M__1M -c read__-P__7__4M__1M {uri}"
        ))?;
        // Requests wait for an OSD that stands still, and go on with it.
        self.cluster.signal_osd(Signal::STOP)?;
        let mut reading = self.command(
            self.cowslip,
            &format!("convert -f raw -O raw {uri} read.raw"),
        );
        let reading = reading
            .stdin(Stdio::null())
            .spawn()
            .map_err(|e| e.to_string())?;
        std::thread::sleep(Duration::from_secs(1));
        self.cluster.signal_osd(Signal::CONT)?;
        let status = reading
            .wait_with_output()
            .map_err(|e| e.to_string())?
            .status;
        if !status.success() {
            return Err(format!("reading through the server: {status}"));
        }
        kill_process(Pid::from_child(&server.0), Signal::TERM).map_err(|e| e.to_string())?;
        let begun = Instant::now();
        while server.0.try_wait().map_err(|e| e.to_string())?.is_none() {
            if begun.elapsed() > Duration::from_secs(10) {
                return Err("the server does not end".to_string());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.ours("compare -F raw vm.qcow2 read.raw")?;
        self.ours("check vm.qcow2")?;
        self.qemu("qemu-img", "compare -F raw vm.qcow2 read.raw")?;
        // The image below has none of it.
        self.same("rbd/golden", "golden.raw")
    }

    fn written(&self) -> Result<(), String> {
        let both = |verbs: &str| -> Result<(), String> {
            for image in ["rbd:rbd/golden", "written.raw"] {
                self.ours(&format!("{} {image}", verbs.replace("IO", "io -f raw")))?;
            }
            Ok(())
        };
        self.ours("convert -f raw -O raw golden.raw written.raw")?;
        both("IO -c write__-P__3__1M__300k -c write__-P__4__9999__77 -c flush")?;
        both("IO -c write__-z__6M__1M -c write__-z__-u__9M__3M -c discard__12M__4M")?;
        for image in ["rbd:rbd/golden", "written.raw"] {
            self.ours(&format!("resize -q -f raw {image} +5M"))?;
        }
        both("IO -c write__-P__5__68M__1M")?;
        for image in ["rbd:rbd/golden", "written.raw"] {
            self.ours(&format!("resize -q -f raw --shrink {image} 66M"))?;
        }
        self.same("rbd/golden", "written.raw")?;
        let map = self.ours("map --output=json -f raw rbd:rbd/golden")?;
        let holes = map.matches("\"data\": false").count();
        match holes > 0 {
            true => Ok(()),
            false => Err(format!("discarded space is data: {map}")),
        }
    }

    fn formatted(&self) -> Result<(), String> {
        self.ours("convert -f raw -O qcow2 golden.raw rbd:rbd/vm.qcow2")?;
        self.ours("io -c write__-P__9__5M__2M -c discard__20M__2M rbd:rbd/vm.qcow2")?;
        self.ours("snapshot -c one rbd:rbd/vm.qcow2")?;
        self.ours("resize -q rbd:rbd/vm.qcow2 +64M")?;
        self.ours("check rbd:rbd/vm.qcow2")?;
        self.qemu("qemu-img", "check -f qcow2 rbd:rbd/vm.qcow2")?;
        self.qemu(
            "qemu-io",
            "-r -f qcow2 -c read__-P__9__5M__2M rbd:rbd/vm.qcow2",
        )?;
        self.ours("convert -O raw rbd:rbd/vm.qcow2 flat.raw")?;
        self.qemu(
            "qemu-img",
            "compare -f qcow2 -F raw rbd:rbd/vm.qcow2 flat.raw",
        )
    }

    fn named(&self) -> Result<(), String> {
        self.cluster.rbd(&["namespace", "create", "rbd/space"])?;
        self.ours(r"create -q -f raw rbd:rbd/space/a\:b\@c 8M")?;
        self.cluster
            .rbd(&[
                "info",
                "--image",
                "a:b@c",
                "--pool",
                "rbd",
                "--namespace",
                "space",
            ])
            .or_else(|_| self.cluster.rbd(&["ls", "rbd/space"]))?;
        self.ours("info --image-opts driver=rbd,pool=rbd,namespace=space,image=a:b@c")?;
        self.qemu("qemu-img", r"info -f raw rbd:rbd/space/a\:b\@c")?;
        let conf = self.cluster.conf();
        self.ours(&format!(
            "info rbd:rbd/golden@v1:conf={}:id=admin",
            conf.display()
        ))?;
        // A clone shows its parent.
        self.cluster.rbd(&["snap", "protect", "rbd/golden@v1"])?;
        self.cluster.rbd(&["clone", "rbd/golden@v1", "rbd/clone"])?;
        self.same("rbd/clone", "golden.raw")
    }

    fn missing(&self) -> Result<(), String> {
        self.refused(
            "info rbd:rbd/none",
            "Ceph has no image 'none' in pool 'rbd' (-2",
        )?;
        self.refused("info rbd:none/golden", "Ceph has no pool 'none' (-2")?;
        self.refused("info rbd:rbd/golden@none", "has no snapshot 'none' (-2")?;
        self.refused(
            "io -f raw -c write__0__4k rbd:rbd/golden@v1",
            "the snapshot 'v1' cannot be written",
        )?;
        if self.cluster.security == Security::Cephx {
            self.refused("info rbd:rbd/golden:keyring=/nowhere", "keyring")?;
            self.refused("info rbd:rbd/golden:id=nobody", "client.nobody")?;
        }
        Ok(())
    }

    /// The last: it leaves the cluster behind.
    fn silent(&self) -> Result<(), String> {
        self.cluster.signal_osd(Signal::STOP)?;
        let begun = Instant::now();
        let outcome = self.refused("--remote-timeout 2 info rbd:rbd/golden", "golden");
        self.cluster.signal_osd(Signal::CONT)?;
        outcome?;
        match begun.elapsed() < Duration::from_secs(15) {
            true => Ok(()),
            false => Err(format!(
                "ended after {:.0} s",
                begun.elapsed().as_secs_f64()
            )),
        }
    }
}
