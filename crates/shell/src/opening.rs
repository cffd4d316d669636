//! `open`, `reopen` and the image of the program's command line: from options to an open image.

use std::rc::Rc;

use cowslip::Image;
use cowslip::file::Sharing;
use cowslip::image::{DiscardPolicy, Format};
use cowslip_cmdline::getopt::{Name, Scanner};
use cowslip_cmdline::open::discard_policy;
use cowslip_cmdline::open::{self, Access, CacheMode, ImageSpec, OpenSettings, Source};
use cowslip_console::error::CommandError;
use cowslip_console::options;
use cowslip_filters::Breakpoints;
use cowslip_nodes::Bottom;

use super::shell::{Complaint, Outcome, Shell};

/// Image to open, and how.
#[derive(Clone, Debug)]
pub struct ImageRequest {
    /// The name of the file; `None` if a list of options names it.
    pub filename: Option<String>,
    /// A list of options: `-o`, `--image-opts`.
    pub options: Option<String>,
    /// The name of the format (`-f`); `None` if it is guessed.
    pub format: Option<String>,
    settings: OpenSettings,
}

impl Default for ImageRequest {
    fn default() -> ImageRequest {
        ImageRequest {
            filename: None,
            options: None,
            format: None,
            settings: OpenSettings {
                access: Access::Write,
                // qemu-io's default, unlike that of other programs.
                discard: DiscardPolicy::Unmap,
                ..open::settings()
            },
        }
    }
}

impl ImageRequest {
    /// Whether there is something to open.
    pub fn names_an_image(&self) -> bool {
        self.filename.is_some() || self.options.is_some()
    }

    /// Sets the breakpoints at which requests stop, if a filter can stop them.
    pub fn stopping_at(mut self, breakpoints: &Breakpoints) -> ImageRequest {
        self.settings.breakpoints = breakpoints.clone();
        self
    }

    /// Takes an option that the program and `open` have in common; others change nothing.
    ///
    /// # Errors
    /// The complaint.
    pub fn take(&mut self, name: Name, value: &str) -> Result<(), String> {
        match name {
            Name::Letter('r') => self.settings.access = Access::Read,
            Name::Letter('n') => self.settings.cache = CacheMode::None,
            Name::Letter('U') => self.settings.sharing = Sharing::Forced,
            Name::Long("backing-policy") => self.settings.policy = open::parse_policy(value)?,
            Name::Letter('k') => self.take(Name::Letter('i'), "native")?,
            Name::Letter('s') => self.settings.temporary = true,
            Name::Letter('C') => self.settings.copy_on_read = true,
            Name::Letter('t') => {
                self.settings.cache = CacheMode::parse(value)
                    .ok_or_else(|| format!("Invalid cache option: {value}"))?;
            }
            Name::Letter('d') => {
                self.settings.discard = discard_policy(value)
                    .ok_or_else(|| format!("Invalid discard option: {value}"))?;
            }
            Name::Letter('i') => {
                self.settings.aio =
                    open::parse_aio(value).ok_or_else(|| format!("Invalid aio option: {value}"))?;
                self.settings.aio_is_native = value == "native";
            }
            _ => {}
        }
        Ok(())
    }

    fn spec(&self) -> ImageSpec {
        match (&self.options, &self.filename) {
            (Some(options), filename) => {
                let mut list = options.clone();
                if let Some(name) = filename {
                    list.push_str(",filename=");
                    list.push_str(&name.replace(',', ",,"));
                }
                ImageSpec {
                    filename: list,
                    format: None,
                    image_opts: true,
                }
            }
            (None, filename) => ImageSpec::named(
                filename.as_deref().unwrap_or_default(),
                self.format.as_deref(),
            ),
        }
    }

    /// Returns the contradiction in the options, found before a file is opened, in QEMU's words.
    fn contradiction(&self, source: Option<&Source>) -> Option<&'static str> {
        let writable = self.settings.access == Access::Write && !self.settings.temporary;
        let option = |is_set: fn(&Source) -> bool| source.is_some_and(is_set);
        let forced =
            self.settings.sharing == Sharing::Forced || option(|source| source.common.force_share);
        if !self.names_an_image() {
            Some("Must specify either driver or file")
        } else if self.filename.as_deref() == Some("") {
            Some("The 'file' block driver requires a file name")
        } else if forced && writable && !option(|source| source.common.read_only) {
            Some("force-share=on can only be used with read-only images")
        } else {
            None
        }
    }
}

/// An open image, and the request that opened it.
pub struct Opened {
    /// The image, shared with requests that are under way.
    pub image: Rc<Image>,
    /// Whether it was opened for writing.
    pub writable: bool,
    /// Warnings about it, for standard error.
    pub warnings: Vec<String>,
    /// Names of the drivers, for a disk that stores nothing instead of an image.
    pub drivers: Option<String>,
    request: ImageRequest,
}

impl Opened {
    /// Takes over an open image, for writing if it can be.
    pub fn adopted(image: Image) -> Opened {
        Opened {
            writable: image.is_writable(),
            image: Rc::new(image),
            warnings: Vec::new(),
            drivers: None,
            request: ImageRequest::default(),
        }
    }

    /// Opens what the request names.
    ///
    /// # Errors
    /// The complaint.
    pub async fn open(request: ImageRequest) -> Result<Opened, String> {
        Opened::open_in_place_of(None, request).await
    }

    /// Opens what the request names, in the place of another open image; see
    /// [`open::reopen_image`].
    async fn open_in_place_of(
        before: Option<&Image>,
        request: ImageRequest,
    ) -> Result<Opened, String> {
        let prefix = match &request.filename {
            Some(name) => format!("can't open device {name}"),
            None => "can't open".to_string(),
        };
        match Opened::open_plainly(before, request).await {
            Ok(opened) => Ok(opened),
            Err(why) => Err(format!("{prefix}: {why}")),
        }
    }

    async fn open_plainly(
        before: Option<&Image>,
        mut request: ImageRequest,
    ) -> Result<Opened, String> {
        let spec = request.spec();
        let reason = |error: CommandError| error.reason_not_to_open();
        if !request.names_an_image() || request.filename.as_deref() == Some("") {
            if let Some(format) = &request.format {
                open::parse_format(format).map_err(|why| why.to_string())?;
            }
            let why = request.contradiction(None);
            return Err(why.unwrap_or("Nothing to open").to_string());
        }
        let source = spec.resolve().map_err(|why| reason(why.into()))?;
        if source.common.read_write {
            request.settings.access = Access::Write;
        }
        if let Some(why) = request.contradiction(Some(&source)) {
            return Err(why.to_string());
        }
        if before.is_some() && request.settings.temporary {
            return Err("A temporary snapshot (-s) cannot be reopened".to_string());
        }
        let image = match before {
            Some(image) => {
                let reopened = open::reopen_image(image, &spec, &request.settings).await;
                reopened.map_err(CommandError::from)
            }
            None => open::open_image(&spec, &request.settings).await,
        };
        let image = image.map_err(reason)?;
        let writable = request.settings.access == Access::Write;
        if source.common.read_only && writable {
            // Reported last, after all other errors.
            image.close().await.map_err(|why| why.to_string())?;
            return Err(open::read_only());
        }
        let mut warnings = Vec::new();
        let is_raw = image.layers().first().map(|layer| layer.format) == Some(Format::Raw);
        if is_raw && source.format.is_none() && writable && before.is_none() {
            warnings.push(open::guessed_raw(&source.filename));
        }
        Ok(Opened {
            image: Rc::new(image),
            writable,
            warnings,
            drivers: drivers_of_null(&source),
            request,
        })
    }
}

/// Names of the drivers of a disk that stores nothing: QEMU names such a driver twice, and a format
/// over it once.
fn drivers_of_null(source: &Source) -> Option<String> {
    let Bottom::Protocol { node, bare } = &source.bottom else {
        return None;
    };
    node.file_name()?;
    Some(match bare {
        Some(driver) => format!("format name: {driver}\n").repeat(2),
        None => "format name: raw\n".to_string(),
    })
}

impl Opened {
    /// Refuses switches that do not exist and properties that an open image must keep, in QEMU's
    /// words.
    fn refuse_change(&self, name: &str, value: &str) -> Result<(), String> {
        let own = name.strip_prefix("file.").or(name.strip_prefix("backing."));
        let own = own.unwrap_or(name);
        let layers = self.image.layers();
        let format = |depth: usize| layers.get(depth).map(|layer| layer.format.name());
        let now = match name {
            "driver" => format(0),
            "backing.driver" => format(1),
            "file.driver" => Some("file"),
            _ => None,
        };
        let was_given = self.request.has_option(name, value);
        match own {
            "driver" if now == Some(value) || was_given => Ok(()),
            "node-name" if was_given => Ok(()),
            "driver" | "node-name" => Err(format!("Cannot change the option '{own}'")),
            "read-only" | "auto-read-only" | "cache.direct" | "cache.no-flush" => {
                let switch = options::switch(own, value);
                switch.map(drop).map_err(|why| why.to_string())
            }
            _ => Ok(()),
        }
    }
}

impl Shell {
    pub(super) async fn open_command(&mut self, args: &[String]) -> Outcome {
        let mut scanner = Scanner::new(args, "snCro:ki:t:d:U", &[]);
        let mut request = ImageRequest::default();
        while let Some(option) = scanner.next_option()? {
            match option.name {
                Name::Letter('o') if self.image_options => {
                    let text = "--image-opts and 'open -o' are mutually exclusive";
                    return Err(Complaint::Said(text.to_string()));
                }
                Name::Letter('o') => request.options = Some(option.value()),
                name => request
                    .take(name, &option.value())
                    .map_err(Complaint::ByName)?,
            }
        }
        match scanner.operands()[..] {
            [] => {}
            [options] if self.image_options => request.options = Some(options.to_string()),
            [filename] => request.filename = Some(filename.to_string()),
            _ => return Err(Complaint::Usage(None)),
        }
        self.open(request).await
    }

    /// Closes the image and opens it with other options.
    pub(super) async fn reopen_command(&mut self, args: &[String]) -> Outcome {
        let mut scanner = Scanner::new(args, "c:o:rw", &[]);
        let by_name = |text: &str| Complaint::ByName(text.to_string());
        let (mut access, mut cache, mut options) = (None, None, None::<String>);
        while let Some(option) = scanner.next_option()? {
            match option.name {
                Name::Letter('c') => {
                    let mode = option.value();
                    cache = Some(CacheMode::parse(&mode).ok_or_else(|| {
                        Complaint::ByName(format!("Invalid cache option: {mode}"))
                    })?);
                }
                Name::Letter('o') => options = Some(option.value()),
                letter => {
                    if access.is_some() {
                        return Err(by_name("Only one -r/-w option may be given"));
                    }
                    access = Some(match letter {
                        Name::Letter('r') => Access::Read,
                        _ => Access::Write,
                    });
                }
            }
        }
        if !scanner.operands().is_empty() {
            return Err(Complaint::Usage(None));
        }
        let mut request = self.opened()?.request.clone();
        if let Some(options) = &options {
            let sets = |name: &str| options.split(',').any(|option| option.starts_with(name));
            if access.is_some() && sets("read-only") {
                return Err(by_name("Cannot set both -r/-w and 'read-only'"));
            }
            if cache.is_some() && sets("cache.") {
                return Err(by_name("Cannot set both -c and the cache options"));
            }
            for (name, value) in options::split(options).map_err(|why| by_name(&why.to_string()))? {
                self.opened()?
                    .refuse_change(&name, &value)
                    .map_err(Complaint::ByName)?;
            }
            request.add_options(options);
        }
        request.settings.access = access.unwrap_or(request.settings.access);
        request.settings.cache = cache.unwrap_or(request.settings.cache);
        self.reopen(request).await
    }

    /// Reopens the image. If that fails it stays open as it was.
    async fn reopen(&mut self, request: ImageRequest) -> Outcome {
        self.await_started().await;
        let Some(before) = self.take_opened() else {
            return Ok(());
        };
        let reopened = Opened::open_in_place_of(Some(&before.image), request).await;
        let outcome = reopened.as_ref().map(|_| ()).map_err(String::clone);
        let opened = match reopened {
            Ok(opened) => Ok(opened),
            Err(_) => Opened::open_in_place_of(Some(&before.image), before.request.clone()).await,
        };
        if let Ok(opened) = opened {
            self.set_opened(opened);
        }
        outcome.map_err(Complaint::ByName)
    }
}

impl ImageRequest {
    /// Whether the image was opened with this value of an option.
    fn has_option(&self, name: &str, value: &str) -> bool {
        let options = self.options.as_deref().map(options::split);
        let options = options.and_then(Result::ok).unwrap_or_default();
        options
            .iter()
            .any(|(given, is)| given == name && is == value)
    }

    /// Adds to the options; of an option given twice, the later value counts.
    fn add_options(&mut self, more: &str) {
        let format = self.format.take().map(|format| format!("driver={format}"));
        let before = self.options.take().or(format);
        self.options = Some(match before {
            Some(before) => format!("{before},{more}"),
            None => more.to_string(),
        });
    }
}
