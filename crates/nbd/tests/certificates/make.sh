#!/bin/sh
# Makes the certificates of the tests, for a hundred years, with openssl. Each directory is one party's, with QEMU's
# names of files.
set -eu
cd "$(dirname "$0")"
rm -rf server client bare revoked stranger elsewhere expired
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: > "$work/index"
echo 01 > "$work/serial"
cat > "$work/ca.cnf" <<END
[ca]
default_ca=ours
[ours]
database=$work/index
serial=$work/serial
new_certs_dir=$work
default_md=sha256
policy=any
crlnumber=$work/serial
crl_extensions=list
[list]
authorityKeyIdentifier=keyid
[any]
commonName=supplied
organizationName=optional
countryName=optional
END

key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$work/$1.key" 2>/dev/null; }

authority() { # name
    key "$1"
    openssl req -x509 -new -key "$work/$1.key" -out "$work/$1.crt" -days 36500 -subj "/O=Cowslip tests/CN=$1" \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
}

leaf() { # name authority subject purpose alternative-names [end]
    key "$1"
    openssl req -new -key "$work/$1.key" -out "$work/$1.csr" -subj "$3"
    {
        echo "basicConstraints=critical,CA:FALSE"
        echo "keyUsage=critical,digitalSignature,keyEncipherment"
        echo "extendedKeyUsage=$4"
        [ -z "$5" ] || echo "subjectAltName=$5"
    } > "$work/$1.ext"
    openssl ca -batch -notext -preserveDN -config "$work/ca.cnf" -in "$work/$1.csr" -cert "$work/$2.crt" \
        -keyfile "$work/$2.key" -extfile "$work/$1.ext" -startdate 20200101000000Z -enddate "${6:-21200101000000Z}" \
        -out "$work/$1.crt" 2>/dev/null
}

party() { # directory server|client name
    mkdir -p "$1"
    cp "$work/authority.crt" "$1/ca-cert.pem"
    cp "$work/$3.crt" "$1/$2-cert.pem"
    cp "$work/$3.key" "$1/$2-key.pem"
}

authority authority
authority another-authority
here="DNS:localhost,IP:127.0.0.1,IP:::1"
leaf server authority "/O=Cowslip tests/CN=server" serverAuth "$here"
leaf elsewhere authority "/O=Cowslip tests/CN=elsewhere" serverAuth "DNS:elsewhere.example"
leaf expired authority "/O=Cowslip tests/CN=expired" serverAuth "$here" 20200102000000Z
leaf client authority "/C=DE/O=Cowslip tests, Inc./CN=client" clientAuth ""
leaf revoked authority "/O=Cowslip tests/CN=revoked" clientAuth ""
leaf stranger another-authority "/O=Cowslip tests/CN=stranger" clientAuth ""

party server server server
party elsewhere server elsewhere
party expired server expired
party client client client
party revoked client revoked
party stranger client stranger
# It trusts its own authority too, or it would not use its own certificate.
cat "$work/another-authority.crt" >> stranger/ca-cert.pem
mkdir bare
cp "$work/authority.crt" bare/ca-cert.pem

openssl ca -config "$work/ca.cnf" -keyfile "$work/authority.key" -cert "$work/authority.crt" \
    -revoke "$work/revoked.crt" 2>/dev/null
openssl ca -config "$work/ca.cnf" -keyfile "$work/authority.key" -cert "$work/authority.crt" -gencrl -crldays 36500 \
    -out server/ca-crl.pem 2>/dev/null
