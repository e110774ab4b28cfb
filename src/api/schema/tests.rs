//! Tests of the schema engine: objects in, objects or messages out.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::registry::{Registry, Resource};

/// A built-in kind's type.
fn kind(group: &str, version: &str, kind: &str) -> (Arc<Schemas>, TypeId) {
    let row = Registry::builtin().find_kind(group, version, kind).expect("a built-in kind");
    (row.schemas.clone(), row.version(version).expect("a version").schema)
}

/// A custom kind's type.
fn custom(schema: Value) -> Result<(Arc<Schemas>, TypeId), Vec<String>> {
    let crd = json!({"metadata": {"name": "foos.example.com"}, "spec": {
        "group": "example.com", "names": {"plural": "foos", "kind": "Foo"}, "scope": "Cluster",
        "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}]}});
    let row = Resource::from_crd(&crd).map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    Ok((row.schemas.clone(), row.stored().schema))
}

/// A custom kind with this schema for its spec.
fn spec(schema: Value) -> (Arc<Schemas>, TypeId) {
    custom(json!({"type": "object", "properties": {"spec": schema}})).expect("a structural schema")
}

#[test]
fn decoding() {
    let good = |text: &str| decode_json(text.as_bytes()).expect("JSON");
    assert_eq!(good(r#"{"a":{"b":1,"b":2},"c":[{"d":1,"d":1}],"a":3}"#).duplicates, ["a.b", "c[0].d", "a"]);
    assert_eq!(good(r#"{"a":1,"a":2}"#).value, json!({"a": 2}));
    let deep = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
    assert!(decode_json(deep(MAX_DEPTH - 1).as_bytes()).is_ok());
    for bad in [&deep(100_000), "{", r#"{"a":1} x"#, "", r#"{"a":1e999}"#, "nul"] {
        assert!(decode_json(bad.as_bytes()).is_err(), "{} was accepted", &bad[..bad.len().min(20)]);
    }
    assert!(decode_json(b"{\"a\":\"\xff\"}").is_err());
}

#[test]
fn wrong_types_in_gos_words() {
    let (schemas, pod) = kind("", "v1", "Pod");
    let table = [
        (json!({"spec": {"containers": "x"}}), "json: cannot unmarshal string into Go struct field PodSpec.spec.containers of type []v1.Container"),
        (json!({"spec": {"containers": [{"name": 3}]}}), "json: cannot unmarshal number into Go struct field Container.spec.containers.name of type string"),
        (json!({"spec": {"containers": [{"ports": [{"containerPort": "80"}]}]}}),
            "json: cannot unmarshal string into Go struct field ContainerPort.spec.containers.ports.containerPort of type int32"),
        (json!({"spec": {"terminationGracePeriodSeconds": 1.5}}),
            "json: cannot unmarshal number 1.5 into Go struct field PodSpec.spec.terminationGracePeriodSeconds of type int64"),
        (json!({"metadata": {"labels": {"a": 1}}}), "json: cannot unmarshal number into Go struct field ObjectMeta.metadata.labels of type string"),
        (json!({"spec": {"containers": [{"resources": {"limits": 1}}]}}),
            "json: cannot unmarshal number into Go struct field ResourceRequirements.spec.containers.resources.limits of type v1.ResourceList"),
        (json!({"spec": {"containers": [{"livenessProbe": {"httpGet": {"port": true}}}]}}),
            "json: cannot unmarshal bool into Go struct field HTTPGetAction.spec.containers.livenessProbe.httpGet.port of type int32"),
        (json!({"metadata": {"labels": []}}), "json: cannot unmarshal array into Go struct field ObjectMeta.metadata.labels of type map[string]string"),
        (json!({"spec": {"hostNetwork": "true"}}), "json: cannot unmarshal string into Go struct field PodSpec.spec.hostNetwork of type bool"),
        (json!({"spec": {"containers": [{"resources": {"limits": {"cpu": "1x"}}}]}}),
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"),
        (json!({"metadata": {"creationTimestamp": "yesterday"}}),
            "parsing time \"yesterday\" as \"2006-01-02T15:04:05Z07:00\": cannot parse \"yesterday\" as \"2006\""),
        (json!([]), "json: cannot unmarshal array into Go value of type v1.Pod"),
    ];
    for (object, expected) in table {
        assert_eq!(schemas.check_types(pod, &object), Err(expected.to_owned()), "{object}");
    }
    let (schemas, secret) = kind("", "v1", "Secret");
    assert_eq!(schemas.check_types(secret, &json!({"data": {"a": "%"}})), Err("illegal base64 data at input byte 0".to_owned()));
    let good = json!({"spec": {"containers": null, "volumes": [{"emptyDir": {"sizeLimit": 5}}], "nodeName": null}});
    let (schemas, pod) = kind("", "v1", "Pod");
    assert_eq!(schemas.check_types(pod, &good), Ok(()));
}

#[test]
fn unknown_fields_are_pruned_and_named() {
    let (schemas, pod) = kind("", "v1", "Pod");
    let mut object = json!({"foo": 1, "metadata": {"labels": {"any": "x"}, "bar": 2},
        "spec": {"containers": [{"name": "c", "images": "x"}], "volumes": [{"name": "v", "emptyDir": {"size": 1}}]}});
    let unknown = schemas.prune(pod, &mut object);
    assert_eq!(unknown, ["foo", "metadata.bar", "spec.containers[0].images", "spec.volumes[0].emptyDir.size"]);
    assert_eq!(object, json!({"metadata": {"labels": {"any": "x"}}, "spec": {"containers": [{"name": "c"}], "volumes": [{"name": "v", "emptyDir": {}}]}}));
    // Inside a CRD's schema, too; where a schema may be something else, upstream does not say so.
    let (schemas, crd) = kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
    let schema = |typo: Value| json!({"spec": {"versions": [{"schema": {"openAPIV3Schema": {"properties": {"a": typo}}}}]}});
    let mut object = schema(json!({"tpye": "x", "additionalProperties": {"typo": 1}, "items": {"tpye": 1}}));
    assert_eq!(schemas.prune(crd, &mut object), ["spec.versions[0].schema.openAPIV3Schema.properties.a.tpye"]);
    assert_eq!(object, schema(json!({"additionalProperties": {}, "items": {}})));
}

#[test]
fn objects_are_normalized_as_go_would() {
    let (schemas, pod) = kind("", "v1", "Pod");
    let mut object = json!({
        "metadata": {"name": "p", "creationTimestamp": null, "generateName": "", "labels": {}, "deletionTimestamp": "2026-01-01T01:00:00.5+01:00"},
        "spec": {"containers": [{"name": "", "resources": {"limits": {"cpu": "1000m", "memory": 1024}}, "args": [], "tty": false,
            "securityContext": {"privileged": false}}], "nodeSelector": {}, "affinity": {}, "terminationGracePeriodSeconds": 0},
        "status": {"phase": ""}});
    schemas.normalize(pod, &mut object);
    assert_eq!(object, json!({
        "metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "", "resources": {"limits": {"cpu": "1", "memory": "1024"}}, "securityContext": {"privileged": false}}],
            "affinity": {}, "terminationGracePeriodSeconds": 0},
        "status": {}}));
    // What Go writes whether or not it was set.
    let (schemas, controller) = kind("", "v1", "ReplicationController");
    let mut object = json!({"spec": {"template": {"spec": {"containers": [{"env": [{"value": "v"}]}]}}}});
    schemas.normalize(controller, &mut object);
    assert_eq!(object, json!({"metadata": {}, "spec": {"template": {"metadata": {}, "spec": {
        "containers": [{"name": "", "env": [{"name": "", "value": "v"}], "resources": {}}]}}}, "status": {"replicas": 0}}));
    let (schemas, foo) = spec(json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}));
    let mut object = json!({"metadata": {"creationTimestamp": null}, "spec": {"a": null, "b": ""}});
    schemas.normalize(foo, &mut object);
    assert_eq!(object, json!({"metadata": {}, "spec": {"a": null, "b": ""}}));
}

#[test]
fn builtin_defaults_and_rules() {
    let (schemas, service) = kind("", "v1", "Service");
    let mut object = json!({"spec": {"ports": [{"port": 80}]}});
    schemas.apply_defaults(service, &mut object);
    assert_eq!(object["spec"]["ports"][0]["protocol"], "TCP");

    let check = |group: &str, version: &str, name: &str, object: Value, expected: &[&str]| {
        let (schemas, ty) = kind(group, version, name);
        let actual: Vec<String> = schemas.validate(ty, &object).iter().map(ToString::to_string).collect();
        assert_eq!(actual, expected, "{object}");
    };
    check("", "v1", "Pod", json!({"spec": {"restartPolicy": "Sometimes", "containers": [{"name": "c", "imagePullPolicy": "Often"}]}}), &[
        "spec.containers[0].imagePullPolicy: Unsupported value: \"Often\": supported values: \"Always\", \"IfNotPresent\", \"Never\"",
        "spec.restartPolicy: Unsupported value: \"Sometimes\": supported values: \"Always\", \"Never\", \"OnFailure\"",
    ]);
    check("", "v1", "Pod", json!({"spec": {"containers": [{"name": "c", "env": [{"value": "x"}], "volumeMounts": [{"name": "v"}]}]}}), &[
        "spec.containers[0].env[0].name: Required value",
        "spec.containers[0].volumeMounts[0].mountPath: Required value",
    ]);
    // Nothing is required of a status, and duplicate container ports are tolerated.
    check("", "v1", "Pod", json!({"spec": {"containers": [{"name": "c", "ports": [{"containerPort": 1}, {"containerPort": 1}]}]},
        "status": {"containerStatuses": [{"state": {}}], "conditions": [{"status": "True"}]}}), &[]);
    check("rbac.authorization.k8s.io", "v1", "RoleBinding", json!({"subjects": [{"name": "u"}], "roleRef": {"kind": "Role"}}), &[
        "roleRef.name: Required value",
        "subjects[0].kind: Required value",
    ]);
}

#[test]
fn custom_objects_are_pruned_defaulted_and_validated() {
    let (schemas, foo) = spec(json!({"type": "object", "required": ["name"], "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 5},
        "size": {"type": "integer", "minimum": 1, "maximum": 10, "default": 3},
        "ratio": {"type": "number", "multipleOf": 0.5, "exclusiveMaximum": true, "maximum": 2},
        "mode": {"type": "string", "enum": ["a", "b"]},
        "port": {"x-kubernetes-int-or-string": true},
        "when": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set", "maxItems": 2},
        "ports": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["port", "protocol"], "items": {
            "type": "object", "required": ["port"], "properties": {"port": {"type": "integer"}, "protocol": {"type": "string", "default": "TCP"}}}},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1},
        "open": {"type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": {"known": {"type": "object", "properties": {"a": {"type": "string"}}}}},
        "null": {"type": "string", "nullable": true},
        "either": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "never": {"type": "string", "not": {"enum": ["x"]}},
        "inner": {"type": "object", "properties": {"deep": {"type": "boolean", "default": true}}},
        "filled": {"type": "object", "default": {}, "properties": {"deep": {"type": "boolean", "default": true}}},
        "embedded": {"type": "object", "x-kubernetes-embedded-resource": true, "x-kubernetes-preserve-unknown-fields": true},
    }}));
    let mut object = json!({"spec": {"name": "ok", "extra": 1, "open": {"x": {"y": 1}, "known": {"a": "1", "b": 2}}, "inner": {}, "ports": [{"port": 1}], "null": null}});
    assert_eq!(schemas.prune(foo, &mut object), ["spec.extra", "spec.open.known.b"]);
    schemas.apply_defaults(foo, &mut object);
    assert_eq!(object, json!({"spec": {"name": "ok", "open": {"x": {"y": 1}, "known": {"a": "1"}}, "size": 3, "inner": {"deep": true},
        "filled": {"deep": true}, "ports": [{"port": 1, "protocol": "TCP"}], "null": null}}));
    assert_eq!(schemas.validate(foo, &object), []);

    let check = |spec: Value, expected: &[&str]| {
        let actual: Vec<String> = schemas.validate(foo, &json!({"spec": spec})).iter().map(ToString::to_string).collect();
        assert_eq!(actual, expected);
    };
    check(json!({}), &["spec.name: Required value"]);
    check(json!({"name": 3}), &["spec.name: Invalid value: \"integer\": spec.name in body must be of type string: \"integer\""]);
    check(json!({"name": "ABCDEF"}), &[
        "spec.name: Too long: may not be more than 5 bytes",
        "spec.name: Invalid value: \"ABCDEF\": spec.name in body should match '^[a-z]+$'",
    ]);
    check(json!({"name": "a", "size": 0}), &["spec.size: Invalid value: 0: spec.size in body should be greater than or equal to 1"]);
    check(json!({"name": "a", "ratio": 2}), &["spec.ratio: Invalid value: 2: spec.ratio in body should be less than 2"]);
    check(json!({"name": "a", "ratio": 0.7}), &["spec.ratio: Invalid value: 0.7: spec.ratio in body should be a multiple of 0.5"]);
    check(json!({"name": "a", "mode": "c"}), &["spec.mode: Unsupported value: \"c\": supported values: \"a\", \"b\""]);
    check(json!({"name": "a", "port": true}), &["spec.port: Invalid value: \"boolean\": spec.port in body must be of type integer,string: \"boolean\""]);
    check(json!({"name": "a", "port": "http", "when": "2026-01-01T00:00:00Z"}), &[]);
    check(json!({"name": "a", "when": "today"}), &["spec.when: Invalid value: \"today\": spec.when in body must be of type date-time: \"today\""]);
    check(json!({"name": "a", "tags": ["x", "y", "x"]}), &["spec.tags: Too many: 3: must have at most 2 items", "spec.tags[2]: Duplicate value: \"x\""]);
    check(json!({"name": "a", "ports": [{"port": 1, "protocol": "TCP"}, {"port": 1, "protocol": "TCP"}]}), &[
        "spec.ports[1]: Duplicate value: {\"port\":1,\"protocol\":\"TCP\"}",
    ]);
    check(json!({"name": "a", "labels": {}}), &["spec.labels: Invalid value: 0: spec.labels in body should have at least 1 properties"]);
    check(json!({"name": "a", "mode": null}), &["spec.mode: Invalid value: \"null\": spec.mode in body must be of type string: \"null\""]);
    check(json!({"name": "a", "either": {}}), &[
        "<nil>: Invalid value: \"\": \"spec.either\" must validate one and only one schema (oneOf). Found none valid",
        "spec.either.a: Required value",
    ]);
    check(json!({"name": "a", "either": {"a": "", "b": ""}}), &[
        "<nil>: Invalid value: \"\": \"spec.either\" must validate one and only one schema (oneOf). Found 2 valid alternatives",
    ]);
    check(json!({"name": "a", "never": "x"}), &["<nil>: Invalid value: \"\": \"spec.never\" must not validate the schema (not)"]);
    check(json!({"name": "a", "embedded": {"kind": "Pod"}}), &["spec.embedded.apiVersion: Required value: must not be empty"]);
    // What stays as it was is not held against the writer.
    let old = json!({"spec": {"name": "ABCDEF", "size": 3}});
    let new = json!({"spec": {"name": "ABCDEF", "size": 4}});
    assert_eq!(schemas.validate_update(foo, &new, Some(&old)), []);
}

#[test]
fn schemas_that_are_not_structural() {
    let check = |schema: Value, expected: &[&str]| {
        let actual = custom(schema.clone()).map(|_| ()).expect_err("the schema was accepted");
        assert_eq!(actual, expected, "{schema}");
    };
    const AT: &str = "spec.validation.openAPIV3Schema";
    let at = |rest: &str| format!("{AT}{rest}");
    check(json!({}), &[&at(".type: Required value: must not be empty at the root")]);
    check(json!({"type": "string"}), &[&at(".type: Invalid value: \"string\": must be object at the root")]);
    check(json!({"type": "object", "properties": {"a": {}}}), &[&at(".properties[a].type: Required value: must not be empty for specified object fields")]);
    check(json!({"type": "object", "properties": {"a": {"type": "array"}}}), &[&at(".properties[a].items: Required value: must be specified")]);
    check(json!({"type": "object", "properties": {"a": {"type": "array", "items": {}}}}), &[
        &at(".properties[a].items.type: Required value: must not be empty for specified array items"),
    ]);
    check(json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}).clone(), &[&{
        let error = formats::compile("(").expect_err("it does not compile");
        at(&format!(".properties[a].pattern: Invalid value: \"(\": must be a valid regular expression, but isn't: {error}"))
    }]);
    check(json!({"type": "object", "properties": {"a": {"type": "string", "anyOf": [{"type": "string"}]}}}), &[
        &at(".properties[a].anyOf[0].type: Forbidden: must be empty to be structural"),
    ]);
    check(json!({"type": "object", "properties": {"a": {"type": "integer", "default": "x"}}}), &[
        &at(".properties[a].default: Invalid value: \"string\": <nil> in body must be of type integer: \"string\""),
    ]);
    check(json!({"type": "object", "properties": {"metadata": {"type": "object", "properties": {"labels": {"type": "object"}}}}}), &[
        &at(".properties[metadata]: Forbidden: must not specify anything other than name and generateName, but metadata is implicitly specified"),
    ]);
    check(json!({"type": "object", "properties": {"a": {"type": "array", "x-kubernetes-list-type": "map", "items": {"type": "object"}}}}), &[
        &at(".properties[a].x-kubernetes-list-map-keys: Required value: must not be empty if x-kubernetes-list-type is map"),
    ]);
    assert!(custom(json!({"type": "object", "properties": {"a": {"x-kubernetes-int-or-string": true, "anyOf": [{"type": "integer"}, {"type": "string"}]}}})).is_ok());
}

#[test]
fn immutable_fields() {
    let check = |group: &str, version: &str, name: &str, old: Value, new: Value, expected: &[&str]| {
        let (schemas, ty) = kind(group, version, name);
        let actual: Vec<String> = schemas.validate_update(ty, &new, Some(&old)).iter().map(ToString::to_string).collect();
        assert_eq!(actual, expected, "{new}");
    };
    let class = |provisioner: &str| json!({"provisioner": provisioner, "metadata": {"uid": provisioner}});
    check("storage.k8s.io", "v1", "StorageClass", class("a"), class("a"), &[]);
    check("storage.k8s.io", "v1", "StorageClass", class("a"), class("b"), &["provisioner: Invalid value: \"b\": field is immutable"]);
    check("", "v1", "Secret", json!({"type": "a"}), json!({}), &["type: Invalid value: null: field is immutable"]);
}

#[test]
fn durations() {
    for (text, nanos, canonical) in [
        ("60s", 60_000_000_000, "1m0s"),
        ("1h30m", 5_400_000_000_000, "1h30m0s"),
        ("1.5s", 1_500_000_000, "1.5s"),
        ("0", 0, "0s"),
        ("-2ms", -2_000_000, "-2ms"),
        ("100us", 100_000, "100µs"),
    ] {
        assert_eq!(parse_go_duration(text), Some(nanos), "{text}");
        assert_eq!(formats::go_duration(nanos), canonical);
    }
    for bad in ["", "1", "1x", "s", "-", "1h-2m", "99999999999h"] {
        assert_eq!(parse_go_duration(bad), None, "{bad}");
    }
}

#[test]
fn patterns_in_gos_syntax() {
    let check = |pattern: &str, good: &[&str], bad: &[&str]| {
        let regex = formats::compile(pattern).unwrap_or_else(|error| panic!("{pattern}: {error}"));
        good.iter().for_each(|text| assert!(regex.is_match(text), "{pattern} does not match {text:?}"));
        bad.iter().for_each(|text| assert!(!regex.is_match(text), "{pattern} matches {text:?}"));
    };
    check(r"^\d+$", &["12"], &["\u{0661}"]);
    check(r"^[\w-]+$", &["a_-1"], &["\u{e4}", "a b"]);
    check(r"^[^\w]$", &["-"], &["a"]);
    check(r"^[[&~]+$", &["[&~"], &["a"]);
    check(r"^[]a]+$", &["]a"], &["b"]);
    check(r"^[^]a]+$", &["b"], &["]"]);
    check(r"^[[:alpha:]_]+$", &["a_b"], &["1"]);
    check(r"\Qa.b\E$", &["a.b"], &["axb"]);
    check(r"^(?:a|b){1,3}\z", &["aba"], &["abab"]);
    check(r"\bx\b", &["a x b"], &["axb"]);
    for bad in ["(", "[a", "a{2,1}", r"(?=a)", &format!("(a{{1000}}){{1000}}")] {
        assert!(formats::compile(bad).is_err(), "{bad} was accepted");
    }
}

/// Deterministic noise: every walk takes every shape of value without panicking.
#[test]
fn noise_never_panics() {
    struct Noise(u64);
    impl Noise {
        fn next(&mut self, bound: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % bound
        }
        fn text(&mut self) -> String {
            const PIECES: [&str; 16] = ["", "a", "-", ".", "/", "=", ",", "!", "(", ")", "in", "\u{e4}", "1", "e9", "Ki", "\\"];
            (0..self.next(6)).map(|_| PIECES[self.next(16) as usize]).collect()
        }
        fn value(&mut self, schemas: &Schemas, id: TypeId, depth: usize) -> Value {
            let shape = *schemas.shape(id);
            match (self.next(if depth > 6 { 5 } else { 12 }), shape) {
                (0, _) => Value::Null,
                (1, _) => json!(self.next(2) == 0),
                (2, _) => json!(self.next(1 << 31) as i64 - (1 << 30)),
                (3, _) => self.text().into(),
                (4, _) => json!([{"a": [1.5]}]),
                (_, Shape::Object) => {
                    let fields: Vec<(String, TypeId)> = schemas.fields(id).map(|field| (field.name.to_string(), field.ty)).collect();
                    let mut map = serde_json::Map::new();
                    for (name, ty) in fields {
                        if self.next(4) == 0 {
                            map.insert(name, self.value(schemas, ty, depth + 1));
                        }
                    }
                    map.into()
                }
                (_, Shape::List(item)) => (0..self.next(3)).map(|_| self.value(schemas, item, depth + 1)).collect(),
                (_, Shape::Map(item)) => json!({self.text(): self.value(schemas, item, depth + 1)}),
                _ => self.text().into(),
            }
        }
    }
    let mut noise = Noise(7);
    for (group, version, name) in
        [("", "v1", "Pod"), ("apps", "v1", "Deployment"), ("apiextensions.k8s.io", "v1", "CustomResourceDefinition"), ("", "v1", "Service")]
    {
        let (schemas, ty) = kind(group, version, name);
        for _ in 0..150 {
            let mut value = noise.value(&schemas, ty, 0);
            let fits = schemas.check_types(ty, &value).is_ok();
            schemas.prune(ty, &mut value);
            if fits {
                schemas.normalize(ty, &mut value);
                schemas.apply_defaults(ty, &mut value);
            }
            let _ = schemas.validate(ty, &value);
            if name == "CustomResourceDefinition" {
                let _ = Resource::from_crd(&value);
            }
            if fits && let Ok(bytes) = crate::protobuf::encode_message(&schemas, ty, &value) {
                crate::protobuf::decode_message(&schemas, ty, &bytes).expect("what we encode decodes");
            }
        }
    }
    for _ in 0..3000 {
        let text = noise.text();
        let _ = crate::selector::LabelSelector::parse(&text);
        let _ = crate::selector::FieldSelector::parse(&text);
        let _ = crate::quantity::canonical(&text);
        let _ = parse_go_duration(&text);
        let _ = formats::compile(&text);
        let _ = formats::broken("duration", &text);
        let _ = formats::broken("k8s-resource-fully-qualified-name", &text);
    }
}
