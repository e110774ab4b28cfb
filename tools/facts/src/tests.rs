//! The facts that are checked in are those of the Go modules.

use super::*;

#[test]
fn facts_have_not_drifted() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::set_current_dir(&root).expect("the repository is there");
    let modules = modules::Modules::locate(None).expect("Go and the modules of tests/upstream are there");
    for (name, value) in generate(&modules).expect("facts can be generated") {
        let file = root.join("src/api/facts").join(name);
        let text = fs::read_to_string(&file).expect("the facts are checked in");
        assert!(text == pretty(&value), "{name} has drifted: run `cargo run -p windlass-facts` and look at the difference");
    }
}

#[test]
fn prints_one_line_per_leaf() {
    let value = serde_json::json!({"T": {"fields": {"a": {"type": "string", "proto": 1}}, "map": "atomic"}, "U": {}});
    assert_eq!(pretty(&value), "{\n \"T\": {\n  \"fields\": {\n   \"a\": {\"proto\":1,\"type\":\"string\"}\n  },\n  \"map\": \"atomic\"\n },\n \"U\": {}\n}\n");
}
