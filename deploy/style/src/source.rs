//! The crates of a repository, their files, and the module tree of each target.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, anyhow};
use syn::{Attribute, Expr, Item, Lit, Meta};

/// One Rust file, with its path from the root of the repository.
pub struct SourceFile {
    pub path: String,
    pub text: String,
    pub syntax: syn::File,
    /// True if in `tests/`, `benches/` or `examples/`, or only reachable through a `#[cfg(test)]`
    /// module.
    pub is_test: bool,
}

/// Index into [`Crate::files`].
pub type FileId = usize;
/// Index into [`Crate::modules`].
pub type ModuleId = usize;

/// A module of one target: the scope in which `use` paths are resolved.
pub struct Module {
    pub parent: Option<ModuleId>,
    /// The crate root of the target that the module belongs to.
    pub root: ModuleId,
    pub file: FileId,
    pub children: HashMap<String, ModuleId>,
    /// Names of the functions, types, constants and macros declared here.
    pub declared: Vec<String>,
    /// Names imported by `use`, with the path of each.
    pub aliases: Vec<(String, Vec<String>)>,
    /// Paths of this module's `use path::*`.
    pub globs: Vec<Vec<String>>,
}

/// A package with its files and modules.
pub struct Crate {
    /// The folder, from the root of the repository, for example `tcp/drill`.
    pub folder: String,
    /// The name in Cargo.toml.
    pub package: String,
    pub files: Vec<SourceFile>,
    pub modules: Vec<Module>,
}

impl Crate {
    /// Files whose code is counted.
    pub fn code_files(&self) -> impl Iterator<Item = &SourceFile> {
        self.files.iter().filter(|file| !file.is_test)
    }
}

/// Folders without hand-written files.
const SKIPPED_FOLDERS: [&str; 3] = ["target", ".git", "out"];
/// Folders of a crate with tests or test-like programs.
const TEST_FOLDERS: [&str; 3] = ["tests", "benches", "examples"];

/// All files below `root`, sorted, as paths relative to it.
pub fn list_files(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let absolute = root.join(&folder);
        let entries =
            std::fs::read_dir(&absolute).with_context(|| absolute.display().to_string())?;
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type()?;
            if kind.is_dir() && !SKIPPED_FOLDERS.contains(&name.as_str()) {
                folders.push(folder.join(name));
            } else if kind.is_file() {
                found.push(folder.join(name).to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The first value of `key = "value"` in a Cargo.toml.
fn manifest_value<'a>(manifest: &'a str, key: &str) -> Option<&'a str> {
    manifest.lines().find_map(|line| {
        let value = line
            .trim()
            .strip_prefix(key)?
            .trim_start()
            .strip_prefix('=')?;
        value.trim().strip_prefix('"')?.split('"').next()
    })
}

/// Loads all crates below `root` except fuzz crates, in the order of their folders.
pub fn load_crates(root: &Path, files: &[String]) -> anyhow::Result<Vec<Crate>> {
    let mut crates = Vec::new();
    for manifest_path in files.iter().filter(|path| path.ends_with("/Cargo.toml")) {
        let manifest = std::fs::read_to_string(root.join(manifest_path))?;
        let folder = manifest_path.trim_end_matches("/Cargo.toml").to_owned();
        if folder.ends_with("/fuzz") || !manifest.contains("[package]") {
            continue;
        }
        let package = manifest_value(&manifest, "name")
            .unwrap_or(&folder)
            .to_owned();
        crates.push(Crate {
            folder,
            package,
            files: Vec::new(),
            modules: Vec::new(),
        });
    }
    // A file belongs to the crate with the longest matching folder.
    let folders: Vec<String> = crates.iter().map(|krate| krate.folder.clone()).collect();
    let owner = |path: &str| {
        let inside = |folder: &String| {
            path.strip_prefix(folder.as_str())
                .is_some_and(|rest| rest.starts_with('/'))
        };
        folders
            .iter()
            .filter(|folder| inside(folder))
            .max_by_key(|folder| folder.len())
    };
    for krate in &mut crates {
        for path in files.iter().filter(|path| path.ends_with(".rs")) {
            let inside = &path[krate.folder.len().min(path.len())..];
            if owner(path) != Some(&krate.folder) || inside.contains("/fuzz/") {
                continue;
            }
            let text = std::fs::read_to_string(root.join(path)).with_context(|| path.clone())?;
            let top = inside
                .trim_start_matches('/')
                .split('/')
                .next()
                .unwrap_or("");
            let is_test = TEST_FOLDERS.contains(&top);
            krate.files.push(parse_file(path.clone(), text, is_test)?);
        }
        build_modules(krate);
    }
    Ok(crates)
}

fn parse_file(path: String, text: String, is_test: bool) -> anyhow::Result<SourceFile> {
    let syntax = syn::parse_file(&text).map_err(|error| {
        let start = error.span().start();
        anyhow!("{path}:{}:{}: {error}", start.line, start.column + 1)
    })?;
    Ok(SourceFile {
        path,
        text,
        syntax,
        is_test,
    })
}

/// Builds a crate from files in memory, for tests.
#[cfg(test)]
pub fn crate_from_texts(folder: &str, texts: &[(&str, &str)]) -> Crate {
    let mut krate = Crate {
        folder: folder.to_owned(),
        package: folder.to_owned(),
        files: Vec::new(),
        modules: Vec::new(),
    };
    for (path, text) in texts {
        let file = parse_file(format!("{folder}/{path}"), (*text).to_owned(), false);
        krate.files.push(file.expect("test source parses"));
    }
    build_modules(&mut krate);
    krate
}

/// Returns true if an item with these attributes is test-only.
pub fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        if attribute.path().is_ident("test") {
            return true;
        }
        let Meta::List(list) = &attribute.meta else {
            return false;
        };
        if !list.path.is_ident("cfg") {
            return false;
        }
        let condition = list.tokens.to_string().replace(' ', "");
        condition == "test" || condition.starts_with("all(test,") || condition == "all(test)"
    })
}

/// The string of `#[path = "..."]`.
fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| {
        let Meta::NameValue(pair) = &attribute.meta else {
            return None;
        };
        if !pair.path.is_ident("path") {
            return None;
        }
        let Expr::Lit(literal) = &pair.value else {
            return None;
        };
        let Lit::Str(text) = &literal.lit else {
            return None;
        };
        Some(text.value())
    })
}

/// Resolves `.` and `..` without accessing the file system.
fn normalize(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(result.pop()),
            Component::CurDir => {}
            other => result.push(other),
        }
    }
    result
}

fn build_modules(krate: &mut Crate) {
    let source_folder = format!("{}/src/", krate.folder);
    let by_path: HashMap<String, FileId> = krate
        .files
        .iter()
        .enumerate()
        .map(|(id, file)| (file.path.clone(), id))
        .collect();
    let roots: Vec<FileId> = krate
        .files
        .iter()
        .enumerate()
        .filter(|(_, file)| {
            let Some(inside) = file.path.strip_prefix(&source_folder) else {
                return false;
            };
            let in_bin = inside.strip_prefix("bin/");
            inside == "lib.rs"
                || inside == "main.rs"
                || in_bin.is_some_and(|name| !name.contains('/') || name.ends_with("/main.rs"))
        })
        .map(|(id, _)| id)
        .collect();
    let mut builder = TreeBuilder {
        files: &krate.files,
        by_path,
        modules: Vec::new(),
        test_files: Vec::new(),
    };
    for file in roots {
        let root = builder.add_module(None, file);
        let folder = Path::new(&krate.files[file].path)
            .parent()
            .unwrap_or(Path::new(""));
        builder.add_items(root, &krate.files[file].syntax.items, folder, folder);
    }
    let TreeBuilder {
        modules,
        test_files,
        ..
    } = builder;
    krate.modules = modules;
    for file in test_files {
        krate.files[file].is_test = true;
    }
}

struct TreeBuilder<'a> {
    files: &'a [SourceFile],
    by_path: HashMap<String, FileId>,
    modules: Vec<Module>,
    test_files: Vec<FileId>,
}

impl TreeBuilder<'_> {
    fn add_module(&mut self, parent: Option<ModuleId>, file: FileId) -> ModuleId {
        let id = self.modules.len();
        let root = parent.map_or(id, |parent| self.modules[parent].root);
        self.modules.push(Module {
            parent,
            root,
            file,
            children: HashMap::new(),
            declared: Vec::new(),
            aliases: Vec::new(),
            globs: Vec::new(),
        });
        id
    }

    /// Adds the items of a module. `children` is the folder with the files of `mod name;`, and
    /// `beside` the folder of the file itself, to which `#[path]` is relative.
    fn add_items(&mut self, module: ModuleId, items: &[Item], children: &Path, beside: &Path) {
        for item in items
            .iter()
            .filter(|item| !is_test_only(item_attributes(item)))
        {
            match item {
                Item::Mod(declaration) => self.add_child(module, declaration, children, beside),
                Item::Use(import) => {
                    let mut names = Vec::new();
                    let mut globs = Vec::new();
                    flatten_use(&import.tree, &mut Vec::new(), &mut names, &mut globs);
                    self.modules[module].aliases.append(&mut names);
                    self.modules[module].globs.append(&mut globs);
                }
                other => {
                    if let Some(name) = item_name(other) {
                        self.modules[module].declared.push(name);
                    }
                }
            }
        }
        // Files of test modules have no code that is counted.
        for item in items
            .iter()
            .filter(|item| is_test_only(item_attributes(item)))
        {
            if let Item::Mod(declaration) = item
                && let Some(file) = self.find_file(declaration, children, beside)
            {
                self.test_files.push(file);
            }
        }
    }

    fn add_child(
        &mut self,
        module: ModuleId,
        declaration: &syn::ItemMod,
        children: &Path,
        beside: &Path,
    ) {
        let name = declaration.ident.to_string();
        if let Some((_, items)) = &declaration.content {
            let child = self.add_module(Some(module), self.modules[module].file);
            let folder = match path_attribute(&declaration.attrs) {
                Some(path) => normalize(&beside.join(path)),
                None => children.join(&name),
            };
            self.modules[module].children.insert(name, child);
            self.add_items(child, items, &folder, &folder);
        } else if let Some(file) = self.find_file(declaration, children, beside) {
            let child = self.add_module(Some(module), file);
            self.modules[module].children.insert(name.clone(), child);
            let files = self.files;
            let path = Path::new(&files[file].path);
            let own = path.parent().unwrap_or(Path::new("")).to_owned();
            let is_folder_module = path.file_name().is_some_and(|file| file == "mod.rs");
            let below = if is_folder_module {
                own.clone()
            } else {
                path.with_extension("")
            };
            self.add_items(child, &files[file].syntax.items, &below, &own);
        }
    }

    fn find_file(
        &self,
        declaration: &syn::ItemMod,
        children: &Path,
        beside: &Path,
    ) -> Option<FileId> {
        let name = declaration.ident.to_string();
        let candidates = match path_attribute(&declaration.attrs) {
            Some(path) => vec![normalize(&beside.join(path))],
            None => vec![
                children.join(format!("{name}.rs")),
                children.join(&name).join("mod.rs"),
            ],
        };
        candidates
            .iter()
            .find_map(|path| self.by_path.get(path.to_str()?).copied())
    }
}

/// The names imported by a `use` tree, and the paths of its globs.
pub fn flatten_use(
    tree: &syn::UseTree,
    prefix: &mut Vec<String>,
    names: &mut Vec<(String, Vec<String>)>,
    globs: &mut Vec<Vec<String>>,
) {
    let with = |prefix: &[String], last: String| {
        let mut path = prefix.to_vec();
        if last != "self" {
            path.push(last);
        }
        path
    };
    match tree {
        syn::UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            flatten_use(&path.tree, prefix, names, globs);
            prefix.pop();
        }
        syn::UseTree::Name(name) => {
            let path = with(prefix, name.ident.to_string());
            if let Some(last) = path.last() {
                names.push((last.clone(), path.clone()));
            }
        }
        syn::UseTree::Rename(rename) => {
            names.push((
                rename.rename.to_string(),
                with(prefix, rename.ident.to_string()),
            ));
        }
        syn::UseTree::Glob(_) => globs.push(prefix.clone()),
        syn::UseTree::Group(group) => {
            for tree in &group.items {
                flatten_use(tree, prefix, names, globs);
            }
        }
    }
}

/// The attributes of any item.
pub fn item_attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The name that an item declares, if any.
pub fn item_name(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Mod(item) => &item.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::TraitAlias(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}
