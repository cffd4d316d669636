#!/bin/sh
# link-shared.sh ARCHIVE OUTPUT: makes the shared library of the archive, with the symbols and
# versions of cowslip.map and no others.
set -eu
here=$(dirname "$0")
# What the archive is searched for: all that is exported.
wanted=$(sed -n 's/^ *\(cowslip_[a-z_]*\);$/-Wl,-u,\1/p' "$here/cowslip.map")
# A build of the whole workspace may have TLS with keys shared beforehand in it.
ssl=
if pkg-config --exists libssl 2> /dev/null; then
    ssl='-lssl -lcrypto'
fi
# shellcheck disable=SC2086 # Lists of words.
exec "${CC:-cc}" -shared -Wl,-soname,libcowslip.so.0 -Wl,-z,defs -Wl,-z,now -Wl,--gc-sections \
    -Wl,--strip-debug -Wl,--version-script="$here/cowslip.map" $wanted -o "$2" "$1" \
    -Wl,--as-needed $ssl -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc
