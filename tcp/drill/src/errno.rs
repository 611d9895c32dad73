//! Error numbers of system calls, with Linux's values and names.

/// An error number (errno) as on Linux. Displayed as its symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident = $value:literal),* $(,)?) => {
        impl Errno {
            $(
                #[doc = concat!("`", stringify!($name), "`, ", stringify!($value), " on Linux.")]
                pub const $name: Errno = Errno($value);
            )*

            /// Returns the symbol, or `an unknown error` if no call of this crate returns this number.
            pub fn name(self) -> &'static str {
                match self.0 {
                    $($value => stringify!($name),)*
                    _ => "an unknown error",
                }
            }
        }
    };
}

errnos! {
    EBADF = 9,
    EAGAIN = 11,
    EACCES = 13,
    EINVAL = 22,
    EPIPE = 32,
    ENONET = 64,
    EPROTO = 71,
    EDESTADDRREQ = 89,
    ENOPROTOOPT = 92,
    EOPNOTSUPP = 95,
    EAFNOSUPPORT = 97,
    EADDRINUSE = 98,
    EADDRNOTAVAIL = 99,
    ENETUNREACH = 101,
    ECONNRESET = 104,
    ENOBUFS = 105,
    EISCONN = 106,
    ENOTCONN = 107,
    ETIMEDOUT = 110,
    ECONNREFUSED = 111,
    EHOSTDOWN = 112,
    EHOSTUNREACH = 113,
    EALREADY = 114,
    EINPROGRESS = 115,
}

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
