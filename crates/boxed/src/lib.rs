//! [`macro@boxed`]: an asynchronous function whose future is behind a pointer.
//!
//! Such a future is compiled once, in the crate that has the function, and not again in each that
//! awaits it; and a future that awaits one is small. The attribute reads the tokens of a signature
//! by itself: crates that parse all of Rust would be half of what the core of Cowslip is built of.
//!
//! Knows: methods and functions, with lifetimes and types as parameters, with conditions. Patterns
//! of arguments may not have references in them.

use std::collections::BTreeSet;

use proc_macro::{Delimiter, Group, TokenStream, TokenTree};

/// The lifetime of the future, for as long as all that the arguments refer to lives.
const LIFETIME: &str = "'boxed";

/// Makes `async fn f(..) -> T` a function that returns a boxed future of `T` that is `Send`.
///
/// ```
/// # use cowslip_boxed::boxed;
/// #[boxed]
/// async fn depth(tree: &[Vec<u8>], at: usize) -> usize {
///     match tree.get(at) {
///         None => 0,
///         Some(next) => 1 + depth(tree, usize::from(next[0])).await,
///     }
/// }
/// # let waker = std::task::Waker::noop();
/// # let mut context = std::task::Context::from_waker(waker);
/// # let tree = [vec![1], vec![2], vec![9]];
/// # let depth = depth(&tree, 0).as_mut().poll(&mut context);
/// # assert_eq!(depth, std::task::Poll::Ready(3));
/// ```
#[proc_macro_attribute]
pub fn boxed(_attribute: TokenStream, function: TokenStream) -> TokenStream {
    let tokens: Vec<TokenTree> = function.into_iter().collect();
    let signature = Signature::read(&tokens);
    signature.unwrap_or_else(|| {
        let text = r#"compile_error!("`boxed` is for asynchronous functions with a body");"#;
        parse(text)
    })
}

fn parse(text: &str) -> TokenStream {
    text.parse().expect("the text is Rust")
}

fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident.to_string() == word)
}

fn is_sign(token: &TokenTree, sign: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == sign)
}

struct Signature;

impl Signature {
    /// The function in its new form, if these tokens are one.
    fn read(tokens: &[TokenTree]) -> Option<TokenStream> {
        let asynchronous = tokens.iter().position(|token| is_word(token, "async"))?;
        let name = asynchronous + 2;
        tokens.get(name - 1).filter(|token| is_word(token, "fn"))?;
        // Parameters in angle brackets have no groups of this kind before the arguments.
        let arguments = name + tokens[name..].iter().position(is_arguments)?;
        let (last, rest) = tokens.split_last()?;
        let body = match last {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => group,
            _ => return None,
        };
        let rest = &rest[arguments + 1..];
        let conditions = rest.iter().position(|token| is_word(token, "where"));
        let (output, conditions) = rest.split_at(conditions.unwrap_or(rest.len()));

        let mut named = BTreeSet::new();
        let own = with_lifetimes(&tokens[arguments..=arguments], &mut named);
        let output = match output {
            [dash, _, rest @ ..] if is_sign(dash, '-') => with_lifetimes(rest, &mut named),
            _ => parse("()"),
        };
        let mut made: TokenStream = tokens[..asynchronous].iter().cloned().collect();
        made.extend(tokens[asynchronous + 1..=name].iter().cloned());
        made.extend(parameters(&tokens[name + 1..arguments]));
        made.extend(own);
        made.extend(future_of(output));
        made.extend(all_conditions(conditions, &named));
        made.extend(boxed_body(body));
        Some(made)
    }
}

fn is_arguments(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Parenthesis)
}

/// The tokens of types, with the lifetime wherever one may be left out. Collects those with names.
fn with_lifetimes(tokens: &[TokenTree], named: &mut BTreeSet<String>) -> TokenStream {
    let mut made = TokenStream::new();
    let mut before: Option<&TokenTree> = None;
    for (index, token) in tokens.iter().enumerate() {
        let next = tokens.get(index + 1);
        match token {
            // The references in `Fn(&T)` have lifetimes of their own.
            TokenTree::Group(group) if before.is_some_and(is_function) => {
                made.extend([TokenTree::Group(group.clone())]);
            }
            TokenTree::Group(group) => {
                let inside: Vec<TokenTree> = group.stream().into_iter().collect();
                let inside = with_lifetimes(&inside, named);
                let mut changed = Group::new(group.delimiter(), inside);
                changed.set_span(group.span());
                made.extend([TokenTree::Group(changed)]);
            }
            TokenTree::Punct(punct) if punct.as_char() == '&' => {
                made.extend([token.clone()]);
                if !next.is_some_and(|next| is_sign(next, '\'')) {
                    made.extend(parse(LIFETIME));
                }
            }
            // A lifetime is two tokens.
            TokenTree::Punct(punct) if punct.as_char() == '\'' => match next {
                Some(name) if is_word(name, "_") => {}
                _ => made.extend([token.clone()]),
            },
            TokenTree::Ident(name) if before.is_some_and(|before| is_sign(before, '\'')) => {
                match name.to_string().as_str() {
                    "_" => made.extend(parse(LIFETIME)),
                    "static" => made.extend([token.clone()]),
                    other => {
                        named.insert(other.to_string());
                        made.extend([token.clone()]);
                    }
                }
            }
            _ => made.extend([token.clone()]),
        }
        before = Some(token);
    }
    made
}

fn is_function(token: &TokenTree) -> bool {
    ["Fn", "FnMut", "FnOnce", "fn"]
        .iter()
        .any(|word| is_word(token, word))
}

/// The parameters of the function, with the lifetime before all others.
fn parameters(own: &[TokenTree]) -> TokenStream {
    let own: TokenStream = match own {
        [open, rest @ .., close] if is_sign(open, '<') && is_sign(close, '>') => {
            rest.iter().cloned().collect()
        }
        _ => TokenStream::new(),
    };
    let mut made = parse("<");
    made.extend(parse(LIFETIME));
    made.extend(parse(","));
    made.extend(own);
    made.extend(parse(">"));
    made
}

fn future_of(output: TokenStream) -> TokenStream {
    let start = "-> ::std::pin::Pin<::std::boxed::Box<dyn ::core::future::Future<Output =";
    let mut made = parse(start);
    made.extend(output);
    made.extend(parse("> + ::core::marker::Send +"));
    made.extend(parse(LIFETIME));
    made.extend(parse(">>"));
    made
}

/// The conditions of the function, and that what has a lifetime by name lives as long as the
/// future.
fn all_conditions(own: &[TokenTree], named: &BTreeSet<String>) -> TokenStream {
    let mut made: TokenStream = own.iter().cloned().collect();
    if own.is_empty() && !named.is_empty() {
        made.extend(parse("where"));
    }
    if own.last().is_some_and(|last| !is_sign(last, ',')) {
        made.extend(parse(","));
    }
    for name in named {
        made.extend(parse(&format!("'{name}: {LIFETIME},")));
    }
    made
}

fn boxed_body(body: &Group) -> TokenStream {
    let mut future = parse("async move");
    future.extend([TokenTree::Group(body.clone())]);
    let mut call = parse("::std::boxed::Box::pin");
    let future = Group::new(Delimiter::Parenthesis, future);
    call.extend([TokenTree::Group(future)]);
    let mut made = Group::new(Delimiter::Brace, call);
    made.set_span(body.span());
    TokenTree::Group(made).into()
}
