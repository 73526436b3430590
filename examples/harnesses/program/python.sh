# run_python CODE ARGUMENTS…: runs Python code with the packages of /tmp/harnesses/python. Neither a variable nor an
# activated environment: programs that the agent starts would inherit it.
run_python() {
  packages="$(echo /tmp/harnesses/python/lib/python3*/site-packages)"
  version="$(basename "$(dirname "$packages")")"
  python="/tmp/python/bin/$version"
  if [ ! -x "$python" ]; then python="$version"; fi # below /usr, which the sandbox shows
  code="import runpy, site; site.addsitedir('$packages'); $1"
  shift
  LD_LIBRARY_PATH="$LD_LIBRARY_PATH:/tmp/python/lib" LITELLM_LOCAL_MODEL_COST_MAP=True "$python" -c "$code" "$@"
}
