//! Dependencies between the files of a crate, and their cycles.
//!
//! A file uses another if a path in it that starts with `crate`, `self`, `super`, a module in
//! scope, or the package's own library resolves to a declaration in the other file. Re-exports are
//! followed to the declaration and do not count as a use themselves.

use std::collections::BTreeMap;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Item, Visibility};

use crate::counts::Place;
use crate::source::{Crate, FileId, ModuleId, flatten_use, is_test_only, item_attributes};

/// For each file, the files that it uses, with the line of the first use.
pub type Edges = BTreeMap<FileId, BTreeMap<FileId, usize>>;

/// Limit on resolution steps, which ends cycles of re-exports.
const DEEPEST_RESOLUTION: usize = 16;

/// Finds the uses between the files of a crate.
pub fn find_edges(krate: &Crate) -> Edges {
    let mut edges = Edges::new();
    let library_path = format!("{}/src/lib.rs", krate.folder);
    let library = (0..krate.modules.len()).find(|&id| {
        let module = &krate.modules[id];
        module.parent.is_none() && krate.files[module.file].path == library_path
    });
    let library_name = krate.package.replace('-', "_");
    for root in (0..krate.modules.len()).filter(|&id| krate.modules[id].parent.is_none()) {
        let mut collector = Collector {
            krate,
            library,
            library_name: &library_name,
            module: root,
            edges: &mut edges,
        };
        collector.visit_module_file();
    }
    edges
}

/// The largest strongly connected set of files, sorted; empty if there is no cycle.
pub fn largest_circle(edges: &Edges) -> Vec<FileId> {
    let mut search = CircleSearch {
        edges,
        visited: BTreeMap::new(),
        stack: Vec::new(),
        best: vec![],
    };
    for &file in edges.keys() {
        if !search.visited.contains_key(&file) {
            search.visit_file(file);
        }
    }
    search.best
}

/// Each use between two files of `circle`.
pub fn uses_inside(krate: &Crate, edges: &Edges, circle: &[FileId]) -> Vec<Place> {
    let mut places = Vec::new();
    for &user in circle {
        for (used, &line) in &edges[&user] {
            if circle.contains(used) {
                let name = krate.files[*used].path.clone();
                places.push(Place {
                    path: krate.files[user].path.clone(),
                    line,
                    name,
                });
            }
        }
    }
    places
}

/// Tarjan's algorithm; the recursion depth is the length of the longest chain of files.
struct CircleSearch<'a> {
    edges: &'a Edges,
    /// Order of the first visit, and the lowest order reachable; `usize::MAX` once the set is
    /// complete.
    visited: BTreeMap<FileId, (usize, usize)>,
    stack: Vec<FileId>,
    best: Vec<FileId>,
}

impl CircleSearch<'_> {
    fn visit_file(&mut self, file: FileId) -> usize {
        let order = self.visited.len();
        self.visited.insert(file, (order, order));
        let depth = self.stack.len();
        self.stack.push(file);
        let mut lowest = order;
        let edges = self.edges;
        for &used in edges.get(&file).into_iter().flat_map(BTreeMap::keys) {
            let reachable = match self.visited.get(&used) {
                Some(&(_, low)) => low,
                None => self.visit_file(used),
            };
            lowest = lowest.min(reachable);
        }
        self.visited.insert(file, (order, lowest));
        if lowest == order {
            let mut circle = self.stack.split_off(depth);
            for member in &circle {
                self.visited.insert(*member, (usize::MAX, usize::MAX));
            }
            if circle.len() > 1 && circle.len() > self.best.len() {
                circle.sort_unstable();
                self.best = circle;
            }
            return usize::MAX;
        }
        lowest
    }
}

struct Collector<'a> {
    krate: &'a Crate,
    library: Option<ModuleId>,
    library_name: &'a str,
    module: ModuleId,
    edges: &'a mut Edges,
}

impl<'a> Collector<'a> {
    /// Visits the file of a module that is a whole file, then its children's files.
    fn visit_module_file(&mut self) {
        let krate = self.krate;
        let file = krate.modules[self.module].file;
        self.visit_items(&krate.files[file].syntax.items);
    }

    fn visit_items(&mut self, items: &'a [Item]) {
        for item in items {
            self.visit_item(item);
        }
    }

    fn add_use(&mut self, path: &[String], line: usize) {
        let Some(used) = self.resolve(self.module, path, 0) else {
            return;
        };
        let user = self.krate.modules[self.module].file;
        if used != user {
            self.edges
                .entry(user)
                .or_default()
                .entry(used)
                .or_insert(line);
        }
    }

    /// Finds the file that declares `path` as seen from `module`.
    fn resolve(&self, module: ModuleId, path: &[String], depth: usize) -> Option<FileId> {
        let modules = &self.krate.modules;
        let (first, rest) = path.split_first()?;
        if depth > DEEPEST_RESOLUTION {
            return None;
        }
        match first.as_str() {
            "crate" => self.resolve_inside(modules[module].root, rest, depth),
            "self" => self.resolve_inside(module, rest, depth),
            "super" => {
                let parent = modules[module].parent?;
                match rest.first().map(String::as_str) {
                    Some("super") => self.resolve(parent, rest, depth),
                    _ => self.resolve_inside(parent, rest, depth),
                }
            }
            name if name == self.library_name && !modules[module].children.contains_key(name) => {
                self.resolve_inside(self.library?, rest, depth)
            }
            name => {
                // A single name is more often local than a module.
                let is_module = modules[module].children.contains_key(name);
                let is_alias = modules[module]
                    .aliases
                    .iter()
                    .any(|(alias, _)| alias == name);
                if rest.is_empty() || !(is_module || is_alias) {
                    return None;
                }
                self.resolve_inside(module, path, depth)
            }
        }
    }

    /// Finds the file that declares `path`, whose first part is looked up in `module` itself.
    fn resolve_inside(&self, module: ModuleId, path: &[String], depth: usize) -> Option<FileId> {
        let scope = &self.krate.modules[module];
        let Some((first, rest)) = path.split_first() else {
            return Some(scope.file);
        };
        if let Some(&child) = scope.children.get(first) {
            return self.resolve_inside(child, rest, depth + 1);
        }
        if scope.declared.contains(first) {
            return Some(scope.file);
        }
        if let Some((_, target)) = scope.aliases.iter().find(|(alias, _)| alias == first) {
            let mut whole = target.clone();
            whole.extend_from_slice(rest);
            // `use name::name` would recurse forever without the depth limit.
            if let Some(file) = self.resolve_alias(module, &whole, depth + 1) {
                return Some(file);
            }
            return None;
        }
        for glob in &scope.globs {
            let mut whole = glob.clone();
            whole.extend_from_slice(path);
            if let Some(file) = self.resolve_alias(module, &whole, depth + 1) {
                return Some(file);
            }
        }
        None
    }

    fn resolve_alias(&self, module: ModuleId, path: &[String], depth: usize) -> Option<FileId> {
        match path.first().map(String::as_str) {
            Some("crate" | "self" | "super") => self.resolve(module, path, depth),
            Some(first) if first == self.library_name => self.resolve(module, path, depth),
            Some(first) if self.krate.modules[module].children.contains_key(first) => {
                self.resolve_inside(module, path, depth)
            }
            // A name of another crate.
            _ => None,
        }
    }

    /// Finds paths like `crate::a::b` in the unparsed arguments of a macro.
    fn scan_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut line = 0;
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.add_scanned(&path, line);
                        path.clear();
                        line = name.span().start().line;
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                other => {
                    self.add_scanned(&path, line);
                    path.clear();
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.scan_tokens(group.stream());
                    }
                }
            }
        }
        self.add_scanned(&path, line);
    }

    fn add_scanned(&mut self, path: &[String], line: usize) {
        if path.len() > 1 {
            self.add_use(path, line);
        }
    }
}

impl<'a> Visit<'a> for Collector<'a> {
    fn visit_item(&mut self, item: &'a Item) {
        if is_test_only(item_attributes(item)) {
            return;
        }
        match item {
            Item::Use(import) => {
                if !matches!(import.vis, Visibility::Inherited) {
                    return;
                }
                let mut names = Vec::new();
                let mut globs = Vec::new();
                flatten_use(&import.tree, &mut Vec::new(), &mut names, &mut globs);
                let line = import.use_token.span.start().line;
                for path in names.iter().map(|(_, path)| path).chain(&globs) {
                    self.add_use(path, line);
                }
            }
            Item::Mod(declaration) => {
                let name = declaration.ident.to_string();
                let Some(&child) = self.krate.modules[self.module].children.get(&name) else {
                    return;
                };
                let outer = std::mem::replace(&mut self.module, child);
                match &declaration.content {
                    Some((_, items)) => self.visit_items(items),
                    None => self.visit_module_file(),
                }
                self.module = outer;
            }
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item(&mut self, item: &'a syn::ImplItem) {
        if let syn::ImplItem::Fn(function) = item
            && is_test_only(&function.attrs)
        {
            return;
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            let names: Vec<String> = path
                .segments
                .iter()
                .map(|segment| segment.ident.to_string())
                .collect();
            self.add_use(&names, path.segments[0].ident.span().start().line);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, invocation: &'a syn::Macro) {
        self.scan_tokens(invocation.tokens.clone());
        visit::visit_macro(self, invocation);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::source::crate_from_texts;

    /// Returns the uses between files, as `user>used`, and the largest cycle.
    fn analyse(texts: &[(&str, &str)]) -> (Vec<String>, Vec<String>) {
        let krate = crate_from_texts("k", texts);
        let edges = find_edges(&krate);
        let name = |file: FileId| krate.files[file].path["k/src/".len()..].to_owned();
        let mut pairs = Vec::new();
        for (&user, used) in &edges {
            pairs.extend(
                used.keys()
                    .map(|&used| format!("{}>{}", name(user), name(used))),
            );
        }
        let circle: BTreeSet<String> = largest_circle(&edges).into_iter().map(name).collect();
        (pairs, circle.into_iter().collect())
    }

    #[test]
    fn re_exports_are_followed_and_are_no_use() {
        let (edges, circle) = analyse(&[
            ("src/lib.rs", "mod a; mod b; pub use a::One;"),
            ("src/a.rs", "pub struct One;"),
            ("src/b.rs", "use crate::One;"),
        ]);
        assert_eq!(edges, ["b.rs>a.rs"]);
        assert!(circle.is_empty());
    }

    #[test]
    fn a_circle_of_inline_and_super_paths_is_found() {
        let (edges, circle) = analyse(&[
            ("src/lib.rs", "mod a; mod b; mod c;"),
            ("src/a.rs", "pub struct One; fn go() { crate::b::go() }"),
            (
                "src/b.rs",
                "pub fn go() { println!(\"{}\", super::c::go()) }",
            ),
            ("src/c.rs", "use super::a::One; pub fn go() {}"),
        ]);
        assert_eq!(edges, ["a.rs>b.rs", "b.rs>c.rs", "c.rs>a.rs"]);
        assert_eq!(circle, ["a.rs", "b.rs", "c.rs"]);
    }

    #[test]
    fn a_parent_that_uses_its_child_counts() {
        let (_, circle) = analyse(&[
            ("src/lib.rs", "mod a;"),
            (
                "src/a/mod.rs",
                "mod inner; pub struct One; fn go() { inner::go() }",
            ),
            ("src/a/inner.rs", "use super::One; pub fn go() {}"),
        ]);
        assert_eq!(circle, ["a/inner.rs", "a/mod.rs"]);
    }

    #[test]
    fn test_modules_use_what_they_like() {
        let (edges, _) = analyse(&[
            ("src/lib.rs", "mod a; mod b;"),
            (
                "src/a.rs",
                "pub struct One; #[cfg(test)] mod tests { use crate::b::Two; }",
            ),
            ("src/b.rs", "use crate::a::One; pub struct Two;"),
        ]);
        assert_eq!(edges, ["b.rs>a.rs"]);
    }

    #[test]
    fn a_program_uses_the_library_of_its_package() {
        let (edges, _) = analyse(&[
            ("src/lib.rs", "pub mod a;"),
            ("src/a.rs", "pub struct One;"),
            ("src/bin/tool.rs", "use k::a::One;"),
        ]);
        assert_eq!(edges, ["bin/tool.rs>a.rs"]);
    }

    #[test]
    fn names_through_a_private_import_of_the_parent_resolve() {
        let (edges, _) = analyse(&[
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "pub struct One;"),
            ("src/b/mod.rs", "mod inner; use crate::a::One;"),
            ("src/b/inner.rs", "use super::One;"),
        ]);
        assert_eq!(edges, ["b/mod.rs>a.rs", "b/inner.rs>a.rs"]);
    }
}
