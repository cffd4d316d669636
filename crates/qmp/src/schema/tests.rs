//! Tests of the declarations, of checks and of the answer to `query-qmp-schema`.

#![allow(clippy::unwrap_used)] // A test: a panic is its verdict.

use serde_json::{Value, json};

use super::*;

const PAINTS: &str = "\
# Paints.
enum Colour: red
    green [deprecated]
    # Between the lines.
    blue
struct Paint [thick]
    colour: Colour
    layers?: uint8 [unstable old]
struct Varnish : Paint
    gloss: [number]
enum CoatKind: paint varnish none
struct CoatBase
    kind: CoatKind
union Coat : CoatBase by kind
    name?: str
    = paint: Paint
    = varnish: Varnish
alternate CoatOrName: Coat str null
command coat-add (Coat) -> [CoatOrName]
    | Adds a coat.
    | It dries.
command coat-del [slow]
    id: int
command coat-list -> Coat [unstable]
event DRY limited by id kind
    | A coat is dry.
    id: size
    kind?: any
";

fn paints() -> Schema {
    Schema::read(&[("paints", PAINTS)]).unwrap()
}

fn check_arguments(command: &str, arguments: Value) -> std::result::Result<Value, String> {
    let schema = paints();
    let Value::Object(mut arguments) = arguments else {
        panic!("arguments are an object");
    };
    let command = schema.command(command).unwrap();
    let checked = schema.check_command(command, &mut arguments);
    checked
        .map(|()| arguments.into())
        .map_err(|error| error.desc)
}

#[test]
fn the_daemons_schema_is_sound() {
    if let Err(error) = Schema::read(FILES) {
        panic!("{error}");
    }
    for command in Schema::of_daemon().commands() {
        assert!(command.text.ends_with('.'), "{} has no text", command.name);
    }
}

#[test]
fn declarations_are_read() {
    let schema = paints();
    let names: Vec<&str> = schema.commands().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["coat-add", "coat-del", "coat-list"]);
    let add = schema.command("coat-add").unwrap();
    assert_eq!(
        (add.text.as_str(), add.arguments.as_str()),
        ("Adds a coat. It dries.", "Coat")
    );
    assert_eq!(schema.command("coat-del").unwrap().features, ["slow"]);
    assert_eq!(schema.command("coat-list").unwrap().features, ["unstable"]);
    let dry = schema.event("DRY").unwrap();
    assert_eq!(
        dry.rate_limited_by.as_deref(),
        Some(&["id".to_string(), "kind".to_string()][..])
    );
    let varnish = schema.object("Varnish");
    let members: Vec<&str> = varnish
        .members
        .iter()
        .map(|one| one.name.as_str())
        .collect();
    assert_eq!(members, ["colour", "layers", "gloss"], "a base comes first");
    assert!(schema.command("DRY").is_none() && schema.event("coat-add").is_none());
    assert!(schema.declared("Colours").is_none());
}

#[test]
fn mistakes_in_declarations_are_found_with_their_lines() {
    for (text, error) in [
        ("colour red\n", "line 1: 'colour' declares nothing"),
        ("    red\n", "line 1: it belongs to no declaration"),
        ("enum A red\n", "line 1: a colon is missing"),
        ("enum A: red red\n", "line 1: 'red' is there twice"),
        (
            "enum A: red\n\nenum A: blue\n",
            "line 3: 'A' is declared twice",
        ),
        ("struct A\n    b\n", "line 2: a colon is missing"),
        ("struct A\n    b:\n", "line 2: a type is missing"),
        ("struct A\n    b: [str\n", "line 2: a bracket is missing"),
        ("struct A\n    b: B\n", "line 1: there is no type 'B'"),
        ("struct A\n    b: [B]\n", "line 1: there is no type 'B'"),
        (
            "struct A\n    b: str\n    b: int\n",
            "line 1: 'b' is there twice",
        ),
        (
            "struct A : B\n",
            "line 1: 'B' is no object to have members of",
        ),
        (
            "struct A : A\n",
            "line 1: 'A' is no object to have members of",
        ),
        (
            "struct A : B\nstruct B : A\n",
            "line 1: 'B' is no object to have members of",
        ),
        (
            "enum B: c\nstruct A : B\n",
            "line 2: 'B' is no object to have members of",
        ),
        (
            "union A by k\n    k: str\n",
            "line 1: 'k' is no member to tell variants apart",
        ),
        (
            "enum K: a\nunion A by k\n    k?: K\n",
            "line 2: 'k' is no member to tell variants apart",
        ),
        (
            "struct K\nunion A by k\n    k: K\n",
            "line 2: 'K' is no enumeration to tell variants apart",
        ),
        ("struct A\n    = a: A\n", "line 1: variants need a tag"),
        (
            "enum K: a\nstruct B\nunion A by k\n    k: K\n    = b: B\n",
            "line 3: 'b' is no value of 'k'",
        ),
        (
            "enum K: a\nunion A by k\n    k: K\n    = a: B\n",
            "line 2: there is no object 'B'",
        ),
        ("alternate A: str B\n", "line 1: there is no type 'B'"),
        ("command a (B)\n", "line 1: there is no object 'B'"),
        ("command a -> B\n", "line 1: there is no type 'B'"),
        (
            "struct B\ncommand a (B)\n    c: str\n",
            "line 2: it has arguments of a type and of its own",
        ),
        ("command a\ncommand a\n", "line 2: 'a' is declared twice"),
        ("event A\n    x: B\n", "line 1: there is no type 'B'"),
    ] {
        let read = Schema::read(&[("good", PAINTS), ("bad", text)]);
        assert_eq!(
            read.unwrap_err().to_string(),
            format!("bad, {error}"),
            "{text}"
        );
    }
}

#[test]
fn values_are_checked_and_numbers_completed() {
    let whole = json!({"kind": "varnish", "colour": "blue", "gloss": [1, 0.5], "name": "x"});
    assert_eq!(check_arguments("coat-add", whole.clone()), Ok(whole));
    assert_eq!(
        check_arguments("coat-add", json!({"kind": "none"})),
        Ok(json!({"kind": "none"}))
    );
    for (arguments, error) in [
        (json!({}), "Parameter 'kind' is missing"),
        (
            json!({"kind": "none", "colour": "red"}),
            "Parameter 'colour' is unexpected",
        ),
        (json!({"kind": "paint"}), "Parameter 'colour' is missing"),
        (
            json!({"kind": "paint", "colour": "red", "layers": 256}),
            "Parameter 'layers' expects uint8_t",
        ),
        (
            json!({"kind": "varnish", "colour": "red", "gloss": [1, "x"]}),
            "Invalid parameter type for 'gloss[1]', expected: number",
        ),
    ] {
        assert_eq!(
            check_arguments("coat-add", arguments.clone()),
            Err(error.into()),
            "{arguments}"
        );
    }
    let schema = paints();
    let dry = schema.event("DRY").unwrap();
    let mut data = json!({"id": -1, "kind": [{}]});
    schema
        .check_event(dry, data.as_object_mut().unwrap())
        .unwrap();
    assert_eq!(
        data["id"],
        u64::MAX,
        "a size that is negative stands for itself and 2^64"
    );
}

#[test]
fn results_are_checked() {
    let schema = paints();
    let check = |command: &str, mut result: Value| {
        let command = schema.command(command).unwrap();
        let checked = schema.check_result(command, &mut result);
        checked.map_err(|error| error.desc)
    };
    assert_eq!(
        check("coat-add", json!(["x", null, {"kind": "none"}])),
        Ok(())
    );
    assert_eq!(check("coat-del", json!({})), Ok(()));
    let wrong = "Invalid parameter type for 'null', expected: ";
    assert_eq!(check("coat-add", json!({})), Err(format!("{wrong}array")));
    assert_eq!(
        check("coat-add", json!([1])),
        Err(format!("{wrong}CoatOrName"))
    );
    assert_eq!(
        check("coat-del", json!({"a": 1})),
        Err(format!("{wrong}empty object"))
    );
    assert_eq!(check("coat-list", json!([])), Err(format!("{wrong}object")));
}

#[test]
fn clients_get_the_declarations_with_types_by_number() {
    let answer = paints().introspect();
    let entries = answer.as_array().unwrap();
    let expected = json!([
        {"name": "coat-add", "ret-type": "[1]", "meta-type": "command", "arg-type": "0"},
        {
            "name": "coat-del", "ret-type": "3", "meta-type": "command", "arg-type": "2",
            "features": ["slow"],
        },
        {
            "name": "coat-list", "ret-type": "0", "meta-type": "command", "arg-type": "3",
            "features": ["unstable"],
        },
        {"name": "DRY", "meta-type": "event", "arg-type": "4"},
        {
            "name": "0", "tag": "kind",
            "variants": [
                {"case": "paint", "type": "5"},
                {"case": "varnish", "type": "6"},
                {"case": "none", "type": "3"},
            ],
            "members": [
                {"name": "kind", "type": "7"},
                {"name": "name", "default": null, "type": "str"},
            ],
            "meta-type": "object",
        },
    ]);
    assert_eq!(entries[..5], expected.as_array().unwrap()[..]);
    let find = |name: &str| entries.iter().find(|entry| entry["name"] == *name).unwrap();
    assert_eq!(
        find("[1]"),
        &json!({"name": "[1]", "element-type": "1", "meta-type": "array"})
    );
    let members = json!([{"type": "0"}, {"type": "str"}, {"type": "null"}]);
    assert_eq!(find("1")["members"], members);
    assert_eq!(find("int")["json-type"], "int");
    assert_eq!(find("5")["features"], json!(["thick"]));
}

#[test]
fn every_type_that_is_named_is_described_once_and_fits_its_own_schema() {
    for schema in [&paints(), Schema::of_daemon()] {
        let answer = schema.introspect();
        let entries = answer.as_array().unwrap();
        let mut names: Vec<&str> = entries
            .iter()
            .map(|one| one["name"].as_str().unwrap())
            .collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count, "each is described once");
        let mut wanted = Vec::new();
        for entry in entries {
            let places = ["arg-type", "ret-type", "element-type"];
            wanted.extend(places.iter().filter_map(|place| entry.get(place)));
            for list in ["members", "variants"] {
                let list = entry
                    .get(list)
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten();
                wanted.extend(list.filter_map(|one| one.get("type")));
            }
        }
        for name in wanted {
            let name = name.as_str().unwrap();
            assert!(names.binary_search(&name).is_ok(), "{name} is described");
        }
        let daemon = Schema::of_daemon();
        let command = daemon.command("query-qmp-schema").unwrap();
        daemon.check_result(command, &mut answer.clone()).unwrap();
    }
}
