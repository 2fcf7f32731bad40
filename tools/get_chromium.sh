#!/usr/bin/env bash
# A headless Chromium for the test that opens the HTML report: tools/get_chromium.sh [FOLDER]  (default .cache/chromium)
# Prints the program. One that is installed is used; else Debian's packages are unpacked into FOLDER, without root.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,3s/^# //p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:-.cache/chromium}")
for name in "${CHROMIUM:-}" chromium-headless-shell chromium chromium-browser google-chrome "$folder/chromium"; do
  if [ -n "$name" ] && command -v "$name" >/dev/null; then command -v "$name"; exit 0; fi
done
for name in apt-get dpkg; do
  command -v $name >/dev/null || { echo "error: no Chromium found, and no $name to get Debian's" >&2; exit 2; }
done

work=$folder.part
rm -rf "$work"
mkdir -p "$work"/{lists/partial,archives/partial,debs,root}
apt=(apt-get -qq -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work" -o "Dir::Cache::archives=$work/archives"
  -o Acquire::Languages=none -o Acquire::Retries=2 -o APT::Sandbox::User=root -o Debug::NoLocking=1)
"${apt[@]}" update >&2
wanted=$("${apt[@]}" --simulate --no-install-recommends install chromium-headless-shell | awk '$1 == "Inst" { print $2 }')
(cd "$work/debs" && "${apt[@]}" download $wanted >&2)
for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done
rm -rf "$work/lists" "$work/archives" "$work/debs" "$work"/*.bin
cat > "$work/chromium" <<'EOF'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/root
export LD_LIBRARY_PATH="$here/usr/lib/$(uname -m)-linux-gnu:$here/usr/lib/$(uname -m)-linux-gnu/pulseaudio:$here/lib/$(uname -m)-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$here/usr/lib/chromium/chromium-headless-shell" "$@"
EOF
chmod +x "$work/chromium"
"$work/chromium" --version >&2
rm -rf "$folder"
mv "$work" "$folder"
echo "$folder/chromium"
