//! Declarations of one file: bindings, functions, public items, types.

use proc_macro2::{Span, TokenStream};
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, ImplItem, Item, TraitItem, Visibility};

use crate::source::{SourceFile, is_test_only, item_attributes, item_name};

/// A name at a line (from 1) of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    pub path: String,
    pub line: usize,
    pub name: String,
}

/// Counts of one file; the vectors hold the findings, the numbers count all.
#[derive(Default)]
pub struct Counts {
    pub bindings: usize,
    pub single_letter_bindings: Vec<Place>,
    pub functions: usize,
    pub one_word_functions: Vec<Place>,
    pub public_items: usize,
    pub undocumented_items: Vec<Place>,
    pub long_functions: Vec<Place>,
    pub types: Vec<Place>,
    /// First and last line of each test-only item.
    pub test_lines: Vec<(usize, usize)>,
}

/// Counts the code of `file`. `has_inner_docs` tells whether the file of a `mod name;` begins with
/// a description.
pub fn count_file(
    file: &SourceFile,
    long_function: usize,
    has_inner_docs: impl Fn(&syn::ItemMod) -> bool,
) -> Counts {
    let mut counter = Counter {
        path: &file.path,
        long_function,
        has_inner_docs: &has_inner_docs,
        in_trait_impl: false,
        counts: Counts::default(),
    };
    counter.visit_file(&file.syntax);
    counter.counts
}

/// Returns true if the name has exactly one letter, regardless of digits and underscores.
fn is_single_letter(name: &str) -> bool {
    let mut letters = name
        .chars()
        .filter(|character| !matches!(character, '0'..='9' | '_'));
    letters.next().is_some() && letters.next().is_none()
}

fn is_one_word(name: &str) -> bool {
    !name
        .trim_start_matches("r#")
        .trim_matches('_')
        .contains('_')
}

fn has_docs(attributes: &[Attribute]) -> bool {
    attributes
        .iter()
        .any(|attribute| attribute.path().is_ident("doc"))
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Calls `visit` for each expression in the arguments of a macro whose arguments parse as a
/// function call or as statements; ignores other macros.
fn visit_macro_arguments<'ast, V: Visit<'ast>>(visitor: &mut V, tokens: &TokenStream) {
    // The parsed nodes are leaked: a few kilobytes, and they save a second visitor.
    let comma_separated = Punctuated::<Expr, syn::Token![,]>::parse_terminated;
    if let Ok(arguments) = comma_separated.parse2(tokens.clone()) {
        let arguments: &'ast _ = Box::leak(Box::new(arguments));
        for argument in arguments {
            visitor.visit_expr(argument);
        }
    } else if let Ok(statements) = syn::Block::parse_within.parse2(tokens.clone()) {
        let statements: &'ast _ = Box::leak(Box::new(statements));
        for statement in statements {
            visitor.visit_stmt(statement);
        }
    }
}

struct Counter<'a> {
    path: &'a str,
    long_function: usize,
    has_inner_docs: &'a dyn Fn(&syn::ItemMod) -> bool,
    in_trait_impl: bool,
    counts: Counts,
}

impl Counter<'_> {
    fn place(&self, span: Span, name: &str) -> Place {
        Place {
            path: self.path.to_owned(),
            line: span.start().line,
            name: name.to_owned(),
        }
    }

    fn add_function(&mut self, signature: &syn::Signature, end: Span) {
        let lines = end.end().line + 1 - signature.fn_token.span.start().line;
        let name = signature.ident.to_string();
        if lines > self.long_function {
            let place = self.place(signature.ident.span(), &format!("{name} {lines} lines"));
            self.counts.long_functions.push(place);
        }
        if !self.in_trait_impl {
            self.counts.functions += 1;
            if is_one_word(&name) {
                self.counts
                    .one_word_functions
                    .push(self.place(signature.ident.span(), &name));
            }
        }
    }

    fn add_public(&mut self, attributes: &[Attribute], documented: bool, span: Span, name: &str) {
        let hidden = attributes.iter().any(|attribute| {
            let syn::Meta::List(list) = &attribute.meta else {
                return false;
            };
            list.path.is_ident("doc") && list.tokens.to_string() == "hidden"
        });
        if hidden {
            return;
        }
        self.counts.public_items += 1;
        if !documented {
            let place = self.place(span, name);
            self.counts.undocumented_items.push(place);
        }
    }

    fn add_type(&mut self, name: &syn::Ident) {
        let place = self.place(name.span(), &name.to_string());
        self.counts.types.push(place);
    }

    /// Records the lines of a test item; returns true if it is one.
    fn skip_test(&mut self, attributes: &[Attribute], span: Span) -> bool {
        let skip = is_test_only(attributes);
        if skip {
            self.counts
                .test_lines
                .push((span.start().line, span.end().line));
        }
        skip
    }
}

impl<'ast> Visit<'ast> for Counter<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if self.skip_test(item_attributes(item), item.span()) {
            return;
        }
        let visibility = match item {
            Item::Const(item) => Some(&item.vis),
            Item::Enum(item) => Some(&item.vis),
            Item::Fn(item) => Some(&item.vis),
            Item::Mod(item) => Some(&item.vis),
            Item::Static(item) => Some(&item.vis),
            Item::Struct(item) => Some(&item.vis),
            Item::Trait(item) => Some(&item.vis),
            Item::Type(item) => Some(&item.vis),
            Item::Union(item) => Some(&item.vis),
            _ => None,
        };
        let attributes = item_attributes(item);
        let exported = matches!(item, Item::Macro(_))
            && attributes
                .iter()
                .any(|attribute| attribute.path().is_ident("macro_export"));
        if visibility.is_some_and(is_public) || exported {
            let described_in_file =
                matches!(item, Item::Mod(module) if (self.has_inner_docs)(module));
            let name = item_name(item).unwrap_or_default();
            let span = match item {
                Item::Fn(item) => item.sig.ident.span(),
                Item::Struct(item) => item.ident.span(),
                Item::Enum(item) => item.ident.span(),
                Item::Const(item) => item.ident.span(),
                Item::Type(item) => item.ident.span(),
                other => other.span(),
            };
            self.add_public(
                attributes,
                has_docs(attributes) || described_in_file,
                span,
                &name,
            );
        }
        match item {
            Item::Struct(item) => self.add_type(&item.ident),
            Item::Enum(item) => self.add_type(&item.ident),
            Item::Trait(item) => self.add_type(&item.ident),
            Item::Type(item) => self.add_type(&item.ident),
            Item::Union(item) => self.add_type(&item.ident),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        let outer = std::mem::replace(&mut self.in_trait_impl, false);
        self.add_function(&function.sig, function.block.span());
        visit::visit_item_fn(self, function);
        self.in_trait_impl = outer;
    }

    fn visit_item_impl(&mut self, implementation: &'ast syn::ItemImpl) {
        let is_trait_impl = implementation.trait_.is_some();
        let outer = std::mem::replace(&mut self.in_trait_impl, is_trait_impl);
        visit::visit_item_impl(self, implementation);
        self.in_trait_impl = outer;
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let (attributes, visibility, name) = match item {
            ImplItem::Const(item) => (&item.attrs, Some(&item.vis), Some(&item.ident)),
            ImplItem::Fn(item) => (&item.attrs, Some(&item.vis), Some(&item.sig.ident)),
            ImplItem::Type(item) => (&item.attrs, None, None),
            ImplItem::Macro(item) => (&item.attrs, None, None),
            _ => return,
        };
        if self.skip_test(attributes, item.span()) {
            return;
        }
        if let (false, Some(visibility), Some(name)) = (self.in_trait_impl, visibility, name)
            && is_public(visibility)
        {
            self.add_public(
                attributes,
                has_docs(attributes),
                name.span(),
                &name.to_string(),
            );
        }
        if let ImplItem::Fn(function) = item {
            self.add_function(&function.sig, function.block.span());
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_item_trait(&mut self, declaration: &'ast syn::ItemTrait) {
        let outer = std::mem::replace(&mut self.in_trait_impl, false);
        for item in &declaration.items {
            let (attributes, name) = match item {
                TraitItem::Fn(item) => (&item.attrs, &item.sig.ident),
                TraitItem::Const(item) => (&item.attrs, &item.ident),
                TraitItem::Type(item) => (&item.attrs, &item.ident),
                _ => continue,
            };
            if is_public(&declaration.vis) && !is_test_only(attributes) {
                self.add_public(
                    attributes,
                    has_docs(attributes),
                    name.span(),
                    &name.to_string(),
                );
            }
        }
        visit::visit_item_trait(self, declaration);
        self.in_trait_impl = outer;
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if self.skip_test(&function.attrs, function.span()) {
            return;
        }
        self.add_function(&function.sig, function.span());
        visit::visit_trait_item_fn(self, function);
    }

    fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
        let name = pattern.ident.to_string();
        // The parser cannot distinguish a constant or an enum variant from a binding.
        if !name.starts_with(|first: char| first.is_uppercase()) {
            self.counts.bindings += 1;
            if is_single_letter(&name) {
                let place = self.place(pattern.ident.span(), &name);
                self.counts.single_letter_bindings.push(place);
            }
        }
        visit::visit_pat_ident(self, pattern);
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if !is_test_only(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_macro(&mut self, invocation: &'ast syn::Macro) {
        visit_macro_arguments(self, &invocation.tokens);
        visit::visit_macro(self, invocation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::crate_from_texts;

    fn count(text: &str) -> Counts {
        let krate = crate_from_texts("k", &[("src/lib.rs", text)]);
        count_file(&krate.files[0], 5, |_| false)
    }

    fn names(places: &[Place]) -> Vec<&str> {
        places.iter().map(|place| place.name.as_str()).collect()
    }

    #[test]
    fn every_kind_of_binding_is_counted() {
        let counts = count(
            "fn add_all(a: u8, word: u8) -> u8 {
                 let b1 = a;
                 for i in 0..word { take(|x| x + i); }
                 match maybe() { Some(n) => n, None => 0, MAX => 1 }
             }",
        );
        assert_eq!(counts.bindings, 6);
        assert_eq!(
            names(&counts.single_letter_bindings),
            ["a", "b1", "i", "x", "n"]
        );
    }

    #[test]
    fn bindings_in_macro_arguments_are_counted() {
        let counts = count("fn check_all() { assert!(all(|x| x > 1), \"{}\", y); }");
        assert_eq!(names(&counts.single_letter_bindings), ["x"]);
    }

    #[test]
    fn imposed_method_names_are_left_out() {
        let counts = count(
            "trait Source { fn read(&self); }
             struct One;
             impl Source for One { fn read(&self) { fn inner() {} } }
             impl One { fn go(&self) {} fn go_on(&self) {} }",
        );
        assert_eq!(counts.functions, 4);
        assert_eq!(names(&counts.one_word_functions), ["read", "inner", "go"]);
    }

    #[test]
    fn test_code_is_left_out() {
        let counts = count(
            "#[cfg(test)]
             mod tests { fn go(a: u8) {} struct One; }
             #[test] fn go(a: u8) {}",
        );
        assert_eq!(
            (counts.bindings, counts.functions, counts.types.len()),
            (0, 0, 0)
        );
        assert_eq!(counts.test_lines, [(1, 2), (3, 3)]);
    }

    #[test]
    fn undocumented_public_items_are_found() {
        let counts = count(
            "/// Words.
             pub struct One { pub field: u8 }
             pub enum Two {}
             pub(crate) fn hidden() {}
             pub trait Three { /// Words.
                 fn first(&self); fn second(&self); }
             impl One { pub fn method(&self) {} }",
        );
        assert_eq!(counts.public_items, 6);
        assert_eq!(
            names(&counts.undocumented_items),
            ["Two", "Three", "second", "method"]
        );
    }

    #[test]
    fn long_functions_are_found() {
        let counts = count("fn short() {\n}\nfn long_one() {\n\n\n\n\n\n}");
        assert_eq!(names(&counts.long_functions), ["long_one 7 lines"]);
        assert_eq!(counts.long_functions[0].line, 3);
    }
}
