//! rdma-core's own test suite (pyverbs) on a device of siwd: every test that is not skipped passes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::common::programs::Program;
use crate::common::{Daemon, siwrun};

const SUITE: &str = "/usr/share/doc/rdma-core/tests";
/// The distribution's Python: other installations lack its modules.
const PYTHON: &str = "/usr/bin/python3";

/// Test files that are not specific to a vendor's devices.
const FILES: [&str; 15] = [
    "test_addr.py",
    "test_atomic.py",
    "test_cq.py",
    "test_cq_events.py",
    "test_cqex.py",
    "test_device.py",
    "test_fork.py",
    "test_mr.py",
    "test_odp.py",
    "test_parent_domain.py",
    "test_pd.py",
    "test_qp.py",
    "test_qpex.py",
    "test_relaxed_ordering.py",
    "test_shared_pd.py",
];

/// Runs the suite and prints a line with the result of each test.
const RUNNER: &str = r#"
import sys, unittest
from importlib.machinery import SourceFileLoader
folder = sys.argv.pop(1)
sys.path.insert(0, folder)
from args_parser import parser
tests = SourceFileLoader("tests", folder + "/__init__.py").load_module()
parser.parse_args()

class Lines(unittest.TestResult):
    def say(self, what, test, why=""):
        print("RESULT", what, test.id(), why.strip().splitlines()[-1:] or "", flush=True)
    def addSuccess(self, test):
        self.say("passed", test)
    def addSkip(self, test, reason):
        self.say("skipped", test, reason)
    def addFailure(self, test, error):
        self.say("failed", test, self._exc_info_to_string(error, test))
    addError = addFailure

unittest.defaultTestLoader.loadTestsFromModule(tests).run(Lines())
"#;

/// Minimum number of passing tests for each file.
const PASSING: [(&str, usize); 11] = [
    ("test_atomic", 7),
    ("test_cq", 3),
    ("test_cq_events", 1),
    ("test_cqex", 3),
    ("test_device", 12),
    ("test_fork", 1),
    ("test_mr", 12),
    ("test_pd", 4),
    ("test_qp", 5),
    ("test_qpex", 10),
    ("test_relaxed_ordering", 1),
];

fn is_installed() -> bool {
    let has_modules = Command::new(PYTHON).args(["-c", "import pyverbs"]).output();
    let has_modules = has_modules.is_ok_and(|out| out.status.success());
    let found = has_modules && Path::new(SUITE).is_dir();
    if !found {
        println!("skipped: rdma-core's tests are not installed (apt-get install python3-pyverbs)");
        assert!(std::env::var_os("CI").is_none(), "CI has to have them");
    }
    found
}

/// Copies the tests and all modules, of which each release has others; the distribution compresses some of
/// the files.
fn copy_suite(folder: &Path) {
    let mut left: BTreeSet<&str> = FILES.into();
    for entry in std::fs::read_dir(SUITE).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap();
        let name = file.strip_suffix(".gz").unwrap_or(file);
        let is_wanted = left.remove(name) || !name.starts_with("test_");
        if !is_wanted || !name.ends_with(".py") {
            continue;
        }
        let text = match name == file {
            true => std::fs::read(&path).unwrap(),
            false => {
                let unpacked = Command::new("gzip").arg("-dc").arg(&path).output();
                unpacked.unwrap().stdout
            }
        };
        std::fs::write(folder.join(name), text).unwrap();
    }
    assert!(left.is_empty(), "{SUITE} lacks {left:?}");
}

/// The suite and its runner in a folder; returns the command that runs it on the first device.
fn prepare_suite(folder: &Path) -> String {
    let tests = folder.join("tests");
    std::fs::create_dir(&tests).unwrap();
    copy_suite(&tests);
    let runner = folder.join("runner.py");
    std::fs::write(&runner, RUNNER).unwrap();
    format!(
        "{PYTHON} {} {} --dev siw0 --port 1 --gid 0",
        runner.display(),
        tests.display()
    )
}

/// Checks what the runner said: no failure, and enough passed tests. Returns the numbers of passed and
/// of skipped tests.
fn check_results(said: &str) -> (usize, usize) {
    let results: Vec<(&str, &str)> = said
        .lines()
        .filter_map(|line| line.strip_prefix("RESULT "))
        .filter_map(|line| {
            let mut words = line.split(' ');
            Some((words.next()?, words.next()?.strip_prefix("tests.")?))
        })
        .collect();
    let named = |what: &str| -> BTreeSet<&str> {
        let found = results.iter().filter(|(found, _)| *found == what);
        found.map(|(_, test)| *test).collect()
    };
    assert_eq!(named("failed"), BTreeSet::new(), "{said}");
    let passed = named("passed");
    for (file, least) in PASSING {
        let prefix = format!("{file}.");
        let count = passed
            .iter()
            .filter(|test| test.starts_with(&prefix))
            .count();
        assert!(count >= least, "{count} of {file} pass:\n{said}");
    }
    (passed.len(), named("skipped").len())
}

#[test]
fn rdma_cores_own_tests_pass() {
    if !is_installed() {
        return;
    }
    let daemon = Daemon::loopback();
    let line = prepare_suite(daemon.dir.path());
    let said = Program::start(&daemon, &line).succeed();
    let (passed, skipped) = check_results(&said);
    println!("{passed} of rdma-core's tests pass, {skipped} are skipped");
}

/// Each run has a siwd of its own, as in the CI of another project. SIWD_PRIVATE_RUNS is another number of
/// runs than 20.
#[test]
fn no_private_run_of_rdma_cores_own_tests_fails() {
    if !is_installed() {
        return;
    }
    let runs: usize = std::env::var("SIWD_PRIVATE_RUNS").map_or(20, |runs| runs.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let line = prepare_suite(folder.path());
    for run in 1..=runs {
        let out = Command::new(siwrun())
            .args(["--private", "--siwd", env!("CARGO_BIN_EXE_siwd"), "--"])
            .args(line.split_whitespace())
            .env("XDG_RUNTIME_DIR", folder.path())
            .env_remove("SIWD_SOCKET")
            .output()
            .unwrap();
        let said = [&out.stdout[..], &out.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(out.status.success(), "run {run} of {runs}: {said}");
        check_results(&said);
    }
}
