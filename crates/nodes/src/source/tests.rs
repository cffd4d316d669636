//! Lists of options, read as trees.

use cowslip::file::host::{Aio, Driver};
use cowslip::image::{BackingChoice, CopyOnRead, Format};
use cowslip::limits::Limits;
use cowslip::qcow2::snapshot::SnapshotChoice;
use cowslip_block::options::{Kind, OptionEntry, Options};

use super::{Bottom, Source};
use crate::ImageSpec;
use crate::drivers::file;
use crate::options::{Above, CommonOptions, ImageOptions};

fn resolve(filename: &str, image_opts: bool) -> Result<Source, String> {
    let spec = ImageSpec {
        filename: filename.to_string(),
        format: None,
        image_opts,
    };
    spec.resolve().map_err(|error| error.to_string())
}

fn of_options(list: &str) -> Source {
    resolve(list, true).unwrap_or_else(|error| panic!("{list}: {error}"))
}

fn refused(list: &str) -> String {
    resolve(list, true).map(|_| ()).unwrap_err()
}

/// The filters over the bytes, and what has them, for comparisons.
fn chain(source: &Source) -> String {
    format!("{:?} {:?}", source.filters, source.bottom)
}

#[test]
fn the_three_ways_to_name_an_image_mean_the_same() {
    let by_options = of_options("driver=qcow2,file.filename=a,,b,backing=,discard=unmap");
    let json = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"a,b"},
        "backing":null,"discard":"unmap"}"#;
    let by_json = resolve(json, false).unwrap();
    // Only one of them says that it is a regular file, and only of one the empty name is said.
    let drivers = (by_options.host.driver, by_json.host.driver);
    assert_eq!(drivers, (Driver::Unsaid, Driver::File));
    assert!(by_options.image.backing_is_empty && !by_json.image.backing_is_empty);
    for source in [&by_options, &by_json] {
        assert_eq!(source.filename, "a,b");
        assert_eq!(source.format, Some(Format::Qcow2));
        assert_eq!(source.image.backing, Some(BackingChoice::None));
        assert_eq!(source.common, by_options.common);
        assert_eq!(chain(source), "[] Host");
        source.check_image_options(Format::Qcow2).unwrap();
        source.check_file_options().unwrap();
    }
    let keys = "driver=qcow2,file.filename=a,encrypt.key-secret=s,backing.encrypt.key-secret=t";
    let keys = of_options(keys).image;
    assert_eq!(keys.key_secret.as_deref(), Some("s"));
    assert_eq!(keys.backing_key_secret.as_deref(), Some("t"));
    let json = r#"json:{"driver":"luks","file.filename":"a","key-secret":"s"}"#;
    let luks = resolve(json, false).unwrap();
    assert_eq!(luks.format, Some(Format::Luks));
    assert_eq!(luks.image.key_secret.as_deref(), Some("s"));
    let both = of_options("file=a,snapshot.id=1,snapshot.name=x").image;
    let swapped = of_options("file=a,snapshot.name=x,snapshot.id=1").image;
    assert_eq!(both, swapped);
    let (id, name) = ("1".to_string(), "x".to_string());
    assert_eq!(both.snapshot, Some(SnapshotChoice::IdAndName { id, name }));
    for (name, file) in [
        ("file:x", "x"),
        ("file:x:y", "./x:y"),
        ("./odd:name", "./odd:name"),
        (":x", ":x"),
    ] {
        assert_eq!(resolve(name, false).unwrap().filename, file);
    }
}

#[test]
fn a_backing_file_is_named_with_its_format_or_without() {
    let backing = |list: &str| of_options(&format!("file=a,{list}")).image.backing.unwrap();
    let named = |format| BackingChoice::Override {
        name: "b".to_string(),
        format,
    };
    assert_eq!(backing("backing=b"), named(None));
    assert_eq!(backing("backing.file.filename=b"), named(None));
    for list in [
        "backing.driver=qcow2,backing.filename=b",
        "backing.file.filename=b,backing.driver=qcow2,backing.lazy-refcounts=on",
    ] {
        assert_eq!(backing(list), named(Some(Format::Qcow2)), "{list}");
    }
    let in_format = BackingChoice::InFormat(Format::Raw);
    assert_eq!(backing("backing.driver=raw"), in_format);
}

#[test]
fn an_export_is_a_file() {
    let remote = |filename, image_opts| {
        let source: Source = resolve(filename, image_opts).unwrap();
        let Bottom::Protocol { node, bare } = source.bottom else {
            panic!("{filename}");
        };
        (node.uri().unwrap(), bare, source.format)
    };
    let raw = Some(Format::Raw);
    let unix = "nbd+unix:///e?socket=/s".to_string();
    assert_eq!(
        remote("nbd:unix:/s:exportname=e", false),
        (unix.clone(), None, None)
    );
    let bare = Some("nbd".to_string());
    assert_eq!(
        remote("driver=nbd,path=/s,export=e", true),
        (unix.clone(), bare, raw)
    );
    let json = r#"json:{"driver":"qcow2","file":{"driver":"nbd","export":"e","server":{"type":"unix","path":"/s"}}}"#;
    assert_eq!(remote(json, false), (unix, None, Some(Format::Qcow2)));
    let (uri, ..) = remote("driver=raw,file.filename=nbd://h/e", true);
    assert_eq!(uri, "nbd://h:10809/e");
    assert!(refused("driver=nbd,export=e").contains("address missing"));
    let other = of_options("driver=raw,file.filename=a,host=h");
    let why = other
        .check_image_options(Format::Raw)
        .unwrap_err()
        .to_string();
    assert!(why.contains("'host'"), "{why}");
}

#[test]
fn a_filter_under_a_format_is_found_by_driver_and_by_name() {
    let one = "driver=qcow2,file.driver=blkdebug,file.config=c,file.image.filename=a,file.align=4k";
    let two = "driver=qcow2,file.filename=blkdebug:c:a,file.align=4k";
    let (one, two) = (of_options(one), of_options(two));
    assert_eq!(chain(&one), chain(&two));
    assert!(chain(&one).contains("config: Some(\"c\")") && chain(&one).contains("align: 4096"));
    assert_eq!((&one.filename[..], one.format), ("a", Some(Format::Qcow2)));
    let bare = of_options("driver=blkdebug,image.filename=a,inject-error.0.event=none");
    assert_eq!((&bare.filename[..], bare.format), ("a", Some(Format::Raw)));
    assert_eq!(bare.filters.len(), 1);
    let part = of_options("driver=raw,offset=1k,size=2k,file.filename=a");
    assert_eq!(chain(&part), "[Part(1024, Some(2048))] Host");
    let below = of_options("driver=qcow2,file.driver=raw,file.offset=1k,file.file.filename=a");
    assert_eq!(chain(&below), "[Part(1024, None)] Host");
    let whole = of_options("driver=raw,file.driver=raw,file.file.filename=a");
    assert_eq!((&whole.filename[..], &chain(&whole)[..]), ("a", "[] Host"));
    let null = of_options("driver=qcow2,file.driver=null-co,file.size=1M");
    assert_eq!(null.filename, "null-co://");
    assert_eq!(
        chain(&of_options("file.filename=null-co://,file.size=1M")),
        chain(&null)
    );
}

#[test]
fn what_a_filter_says_of_the_image_counts_for_less() {
    let list = "driver=qcow2,file.driver=blkdebug,file.image.filename=a,file.read-only=on,\
                file.cache.direct=on";
    let common = of_options(list).common;
    assert!(common.read_only && common.direct == Some(true));
    let common = of_options(&format!("{list},read-only=off")).common;
    assert!(!common.read_only && common.read_write);
    // Said of the file alone, it counts beside the image's.
    assert!(
        of_options("file.filename=a,file.read-only=on")
            .common
            .read_only
    );
    let locked = of_options("driver=file,filename=a,locking=off");
    let below = of_options("driver=blkdebug,config=c,image.filename=a,image.locking=off");
    assert_eq!(locked.host.locking, below.host.locking);
}

#[test]
fn limits_above_a_format_are_those_of_its_disk() {
    let list = "driver=blkdebug,image.driver=qcow2,align=4k,max-transfer=64k,filename=blkdebug::a";
    let source = of_options(list);
    let limits = Limits {
        align: 4096,
        transfer_max: 65536,
        ..Limits::default()
    };
    assert_eq!(
        (source.image.limits, chain(&source)),
        (limits, "[] Host".to_string())
    );
    assert_eq!(
        (&source.filename[..], source.format),
        ("a", Some(Format::Qcow2))
    );
    let list = "driver=blkdebug,image.driver=qcow2,opt-discard=3k,max-discard=4k,filename=a";
    let why = refused(list);
    let said = "Cannot meet constraints with max-discard 4096";
    assert!(why.contains(said), "{why}");
}

#[test]
fn an_image_in_the_chain_is_a_list_of_its_own() {
    for list in [
        "driver=raw,file.driver=qcow2,file.file.filename=a,file.backing=",
        "driver=blkdebug,config=c,image.driver=qcow2,image.file.filename=a,image.backing=",
    ] {
        let source = of_options(list);
        assert_eq!(
            (&source.filename[..], source.format),
            ("a", Some(Format::Raw))
        );
        let image = source.image_below().unwrap();
        assert_eq!((&image.filename[..], &image.given[..]), ("a", list));
        assert_eq!(image.image.backing, Some(BackingChoice::None));
    }
    let list = "driver=blkdebug,config=c,image.driver=qcow2,filename=a";
    assert_eq!(of_options(list).image_below().unwrap().filename, "a");
    let data = of_options("file=a,data-file.driver=raw,data-file.file.filename=b").data_file;
    assert_eq!(data.unwrap().filename, "b");
}

#[test]
fn filters_over_an_image_are_options_of_it() {
    let list = "driver=compress,read-only=on,file.driver=copy-on-read,file.bottom=b,\
                file.file.driver=qcow2,file.file.backing.node-name=b,filename=a";
    let source = of_options(list);
    assert!(source.image.compress && source.common.read_only);
    assert_eq!(source.image.copy_on_read, Some(CopyOnRead::DownTo(1)));
    assert_eq!(
        (&source.filename[..], source.format),
        ("a", Some(Format::Qcow2))
    );
    let unknown = list.replace("file.bottom=b", "file.bottom=c");
    assert!(refused(&unknown).ends_with("Bottom node 'c' not found"));
    let all = of_options("driver=copy-on-read,file.filename=a");
    assert_eq!(all.image.copy_on_read, Some(CopyOnRead::All));
    assert_eq!(
        (all.format, all.host.driver),
        (Some(Format::Raw), Driver::File)
    );
}

#[test]
fn a_chain_without_end_is_refused() {
    for (child, driver) in [
        ("image.", "blkdebug"),
        ("file.", "qcow2"),
        ("file.", "raw"),
        ("file.", "copy-on-read"),
    ] {
        for depth in [60, 70, 200] {
            let node = |depth: usize| format!("{}driver={driver}", child.repeat(depth));
            let list: Vec<String> = (0..depth).map(node).collect();
            let why = refused(&list.join(","));
            let said = why.ends_with("more than 64 nodes in a chain are not supported");
            assert_eq!(said, depth > 64, "{driver} {depth}");
        }
    }
}

#[test]
fn what_is_not_understood_is_refused() {
    let why = resolve("foo:x", false).map(|_| ()).unwrap_err();
    assert_eq!(why, "Could not open 'foo:x': Unknown protocol 'foo'");
    for (list, said) in [
        ("driver=foo,file.filename=a", "Unknown driver 'foo'"),
        ("driver=vmdk,file.filename=a", "'vmdk' is not supported"),
        (
            "driver=qcow2,file.driver=ftp,file.url=ftp://h/a",
            "'ftp' is not supported; let nbdkit serve it",
        ),
        (
            "driver=throttle,file.filename=a",
            "'throttle' is not supported",
        ),
        (
            "driver=qcow2,file.driver=quorum",
            "'quorum' is not supported",
        ),
        ("driver=qcow2", "must be specified for \"file\""),
        ("driver=copy-on-read", "must be specified for \"file\""),
        ("driver=blkdebug", "must be specified for \"image\""),
        ("size=1", "Must specify either driver or file"),
        (
            "driver=qcow2,file.driver=blkdebug,file.image.filename=a,file.foo=1",
            "Block protocol 'blkdebug' doesn't support the option 'foo'",
        ),
        (
            "driver=qcow2,file.driver=blkdebug,file.image.filename=a,file.inject-error.1.event=none",
            "Unused option '1.event' for [inject-error]",
        ),
        (
            "driver=null-co,foo=1",
            "Block protocol 'null-co' doesn't support the option 'foo'",
        ),
        (
            "driver=qcow2,file.filename=blkdebug:a",
            "blkdebug requires both config file and image path",
        ),
        (
            "driver=compress,bottom=a,file=b",
            "Block format 'compress' does not support the option 'bottom'",
        ),
        (
            "driver=copy-on-read,foo=1,file.driver=qcow2",
            "Block format 'copy-on-read' does not support the option 'foo'",
        ),
        (
            "driver=qcow2,file.filename=a,backing.encrypt.format=x",
            "Block option 'backing.encrypt.format' is not supported",
        ),
        (
            "file.filename=a,image.foo=1",
            "Block option 'image.foo' is not supported",
        ),
        (
            "file.filename=a,file.pr-manager=x",
            "Block option 'file.pr-manager' is not supported",
        ),
        ("file.filename=a,file.drop-cache=x", "expects 'on' or 'off'"),
        ("file.filename=a,discard=x", "Invalid discard option"),
        (
            "driver=file,filename=a,pr-manager=x",
            "Block option 'file.pr-manager' is not supported",
        ),
        ("driver=file,filename=a,aio=x", "invalid parameter value: x"),
    ] {
        let why = refused(list);
        assert!(
            why.starts_with(&format!("Could not open '{list}': ")),
            "{why}"
        );
        assert!(why.ends_with(said) || why.contains(said), "{list}: {why}");
    }
    #[cfg(not(feature = "rbd"))]
    assert!(resolve("rbd:x", false).is_err_and(|why| why.contains("map it")));
    #[cfg(feature = "rbd")]
    assert!(resolve("rbd:x", false).is_err_and(|why| why.contains("Pool name is required")));
    assert!(resolve("json:[]", false).is_err_and(|why| why.contains("Invalid JSON")));
    assert!(resolve("json:{", false).is_err_and(|why| why.contains("JSON")));
}

#[test]
fn some_refusals_wait_for_the_open_image() {
    let lazy = of_options("file=a,lazy-refcounts=on");
    lazy.check_image_options(Format::Qcow2).unwrap();
    for (options, format, option) in [
        ("lazy-refcounts=on", Format::Raw, "lazy-refcounts"),
        ("x=1", Format::Qcow2, "x"),
        ("encrypt.key-secret=s", Format::Raw, "encrypt.key-secret"),
        ("encrypt.key-secret=s", Format::Luks, "encrypt.key-secret"),
        ("key-secret=s", Format::Qcow2, "key-secret"),
        ("offset=1", Format::Qcow2, "offset"),
    ] {
        let source = of_options(&format!("file.filename=a,{options}"));
        let why = source.check_image_options(format).unwrap_err().to_string();
        let format = format.name();
        let text = format!("Block format '{format}' does not support the option '{option}'");
        assert_eq!(why, text);
        source.check_file_options().unwrap();
    }
    // A disk that is a file's bytes has the options of the file.
    let words = "driver=file,filename=a,aio=threads,drop-cache=off,read-only=on,offset=0";
    let bare = of_options(words);
    bare.check_image_options(Format::Raw).unwrap();
    bare.check_file_options().unwrap();
    assert_eq!(bare.host.aio, Some((Aio::Threads, false)));
    for option in ["foo", "lazy-refcounts"] {
        let bare = of_options(&format!("driver=file,filename=a,{option}=on"));
        let why = bare.check_file_options().unwrap_err().to_string();
        let text = format!("Block protocol 'file' doesn't support the option '{option}'");
        assert_eq!(why, text);
    }
    for (option, said) in [
        ("pass-discard-other=x", "expects 'on' or 'off'"),
        ("auto-read-only=x", "expects 'on' or 'off'"),
        ("overlap-check=x", "Unsupported value 'x'"),
        ("node-name=1", "Invalid node-name: '1'"),
    ] {
        let source = of_options(&format!("file=a,{option}"));
        let why = source
            .check_image_options(Format::Qcow2)
            .unwrap_err()
            .to_string();
        assert!(why.contains(said), "{option}: {why}");
    }
    let source = of_options("file.filename=a,file.foo=1");
    let why = source.check_file_options().unwrap_err().to_string();
    assert_eq!(
        why,
        "Block protocol 'file' doesn't support the option 'foo'"
    );
    source.check_image_options(Format::Raw).unwrap();
}

/// A name that an entry of a table stands for.
fn example(option: &OptionEntry) -> String {
    match option.name {
        "encrypt." => "encrypt.format".to_string(),
        "overlap-check." => "overlap-check.template".to_string(),
        "inject-error." | "set-state." => format!("{}0.event", option.name),
        group if group.ends_with('.') => format!("{group}type"),
        name => name.to_string(),
    }
}

/// Some value of an entry's kind.
fn value(option: &OptionEntry) -> String {
    match option.kind {
        _ if !option.default.is_empty() => option.default.to_string(),
        Kind::Switch => "on".to_string(),
        Kind::Size => "512".to_string(),
        Kind::Number => "1".to_string(),
        Kind::Text => "none".to_string(),
    }
}

#[test]
fn every_option_of_a_table_is_read_and_has_a_value_of_its_kind_by_default() {
    let registry = crate::drivers::standard();
    let mut images: Vec<&OptionEntry> = Vec::new();
    images.extend(ImageOptions::OPTIONS.iter().chain(CommonOptions::OPTIONS));
    images.retain(|option| option.name != "detect-zeroes" && option.name != "discard");
    for option in images {
        let list = format!("file=a,{}={}", example(option), value(option));
        let source = of_options(&list);
        source.check_image_options(Format::Qcow2).unwrap();
    }
    for option in file::OPTIONS
        .iter()
        .filter(|option| option.name != "filename")
    {
        let list = format!("file.filename=a,file.{}={}", option.name, value(option));
        of_options(&list).check_file_options().unwrap();
    }
    for format in &registry.formats {
        for option in format.options() {
            let taken = format.take(
                &mut ImageOptions::default(),
                &example(option),
                &value(option),
            );
            assert!(taken.unwrap(), "{}", option.name);
        }
    }
    let has_all_read = |table: &[OptionEntry], read: &dyn Fn(&mut Options) -> bool| {
        for option in table {
            let mut options = Options::default();
            options.put(&example(option), value(option));
            let is_read = read(&mut options);
            assert!(!is_read || options == Options::default(), "{}", option.name);
        }
    };
    for filter in &registry.filters {
        // Rules are validated when they are put over a file.
        has_all_read(filter.options(), &|options| {
            filter.take_child_name(options);
            filter.read(options).unwrap();
            true
        });
    }
    for filter in &registry.image_filters {
        has_all_read(filter.options(), &|options| {
            filter.read(options, &mut Above::default()).unwrap();
            true
        });
    }
    for protocol in &registry.protocols {
        // One option is not enough for most exports.
        has_all_read(protocol.options(), &|options| {
            options.put("host", "h".to_string());
            let read = protocol.read(protocol.names()[0], options);
            options.take("host");
            read.is_ok()
        });
    }
}
