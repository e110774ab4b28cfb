use super::*;
use crate::pod::model::tests::pod;
use serde_json::{Value, json};

fn build(pod_spec: Value, image_user: &str) -> Result<ContainerConfig, Why> {
    let pod = pod(pod_spec);
    let image = Image { id: "sha256:1".into(), user: image_user.into(), ..Default::default() };
    let parts = Parts {
        pod: &pod,
        container: &model::containers(&pod)[0],
        kind: Kind::Regular,
        image: &image,
        sandbox: "box",
        attempt: 2,
        env: vec![("A".into(), "1".into())],
        mounts: Vec::new(),
        hosts_file: Some("/h".into()),
        resolv_file: None,
        termination_file: "/t".into(),
        target: None,
    };
    container(&parts, &Settings::default())
}

fn with(container: Value, pod: Value) -> Value {
    let mut spec = pod;
    let mut c = json!({"name": "c"});
    c.as_object_mut().expect("object").extend(container.as_object().expect("object").clone());
    spec["containers"] = json!([c]);
    spec
}

#[test]
fn users() {
    let check = |container: Value, pod: Value, image: &str, expected: Result<Option<&str>, &str>| {
        let got = build(with(container, pod), image);
        match (got, expected) {
            (Ok(config), Ok(user)) => assert_eq!(config.user.as_deref(), user),
            (Err(why), Err(part)) => assert!(why.message.contains(part), "{}", why.message),
            (got, expected) => panic!("{got:?} {expected:?}"),
        }
    };
    let own = |v: Value| json!({ "securityContext": v });
    check(json!({}), json!({}), "", Ok(None));
    check(own(json!({"runAsUser": 5})), own(json!({"runAsUser": 6, "runAsGroup": 7})), "", Ok(Some("5:7")));
    check(json!({}), own(json!({"runAsGroup": 7})), "3", Ok(Some("3:7")));
    check(own(json!({"runAsNonRoot": true})), json!({}), "", Err("image will run as root"));
    check(own(json!({"runAsNonRoot": true})), json!({}), "nobody", Err("non-numeric user (nobody)"));
    check(own(json!({"runAsNonRoot": true})), json!({}), "1000:1000", Ok(None));
    check(own(json!({"runAsNonRoot": true, "runAsUser": 0})), json!({}), "1000", Err("breaks non-root policy"));
    check(own(json!({"runAsNonRoot": false})), own(json!({"runAsNonRoot": true})), "", Ok(None));
}

#[test]
fn commands_are_expanded() {
    let config = build(with(json!({"command": ["sh", "-c"], "args": ["echo $(A) $(B) $$(A)"]}), json!({})), "").expect("builds");
    assert_eq!(config.args, Some(vec!["echo 1 $(B) $(A)".to_owned()]));
    let config = build(with(json!({"command": ["sh"]}), json!({})), "").expect("builds");
    assert_eq!(config.args, Some(vec![]), "the image's arguments do not follow another command");
    let config = build(with(json!({"args": ["x"]}), json!({})), "").expect("builds");
    assert_eq!((config.command, config.args), (None, Some(vec!["x".to_owned()])));
}

#[test]
fn names_namespaces_and_mounts() {
    let config = build(with(json!({}), json!({"shareProcessNamespace": true, "hostIPC": true, "securityContext": {"fsGroup": 9, "supplementalGroups": [4]}})), "").expect("builds");
    assert_eq!(config.unique_name, "k8s_c_p_ns_u1_2");
    assert_eq!((config.pid, config.ipc, config.network), (Namespace::Container("box".into()), Namespace::Host, Namespace::Container("box".into())));
    assert_eq!(config.groups, ["9", "4"]);
    let paths: Vec<&str> = config.mounts.iter().map(|m| m.container_path.as_str()).collect();
    assert_eq!(paths, ["/etc/hosts", "/dev/termination-log"]);
}

#[test]
fn volume_mounts() {
    let volumes = HashMap::from([("v".to_owned(), Mounted { path: "/data".into(), read_only: false })]);
    let check = |mount: Value, expected: Result<(Option<&str>, bool), &str>| {
        let mount = serde_json::from_value(mount).expect("mount");
        match (volume_mount(&mount, &volumes, &[("P".into(), "x".into())]), expected) {
            (Ok((_, sub, made)), Ok((want, ro))) => assert_eq!((sub.as_deref(), made.read_only), (want, ro)),
            (Err(why), Err(part)) => assert!(why.message.contains(part), "{}", why.message),
            (got, expected) => panic!("{got:?} {expected:?}"),
        }
    };
    check(json!({"name": "v", "mountPath": "/a"}), Ok((None, false)));
    check(json!({"name": "v", "mountPath": "/a", "readOnly": true, "subPath": "s"}), Ok((Some("s"), true)));
    check(json!({"name": "v", "mountPath": "/a", "subPathExpr": "$(P)/y"}), Ok((Some("x/y"), false)));
    check(json!({"name": "v", "mountPath": "/a", "subPathExpr": "$(Q)"}), Err("missing value for \"Q\""));
    check(json!({"name": "v", "mountPath": "/a", "subPath": "../x"}), Err("must not be an absolute path"));
    check(json!({"name": "w", "mountPath": "/a"}), Err("cannot find volume"));
    check(json!({"name": "v", "mountPath": "/a", "recursiveReadOnly": "Enabled"}), Err("not supported"));
}
