//! Runs every script below `scripts/`, one test per directory. A failing script reports its name, the
//! line, and the expectation.

use std::path::Path;

fn run_directory(name: &str) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("scripts")
        .join(name);
    let mut scripts: Vec<_> = std::fs::read_dir(&dir)
        .expect("the directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "pkt"))
        .collect();
    scripts.sort();
    assert!(!scripts.is_empty(), "{} has no scripts", dir.display());
    let mut failures = vec![];
    for path in scripts {
        let text = std::fs::read_to_string(&path).expect("a script");
        let outcome = siw_drill::run_script(&path.display().to_string(), &text);
        if let Err(failure) = outcome.result {
            failures.push(format!("{failure}\n{}", outcome.trace.join("\n")));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

macro_rules! directories {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                run_directory(stringify!($name));
            }
        )*

        #[test]
        fn every_directory_of_scripts_is_run() {
            let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
            let mut found: Vec<_> = std::fs::read_dir(all)
                .expect("the scripts")
                .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
                .collect();
            found.sort();
            let mut listed = vec![$(stringify!($name)),*];
            listed.sort_unstable();
            assert_eq!(found, listed);
        }
    };
}

directories! {
    keepalive,
    pacing,
    rfc1191,
    rfc2018,
    rfc2883,
    rfc3042,
    rfc3168,
    rfc3708,
    rfc4987,
    rfc5681,
    rfc5961,
    rfc6298,
    rfc6528,
    rfc6582,
    rfc6675,
    rfc7323,
    rfc7661,
    rfc8201,
    rfc8257,
    rfc8899,
    rfc8985,
    rfc9293,
    rfc9406,
    rfc9438,
    rfc9937,
    sockets,
    user_timeout,
}
