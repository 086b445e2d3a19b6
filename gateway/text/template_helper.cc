// The helper process's side of ChatTemplate: an isolated Python interpreter that runs
// template_helper.py until the gateway closes the channel.

#include <Python.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "gateway/text/chat_template.h"
#include "gateway/text/template_process.h"

namespace tandem::gateway {

extern const char kTemplateHelperScript[];

namespace {

bool SetString(PyConfig* config, wchar_t** field, const wchar_t* value) {
  return PyStatus_Exception(PyConfig_SetString(config, field, value)) == 0;
}

// Nothing of the environment, the working directory or the user's site counts: the interpreter has
// exactly the standard library and the directory of Jinja2 that the build found.
bool StartInterpreter() {
  PyConfig config;
  PyConfig_InitIsolatedConfig(&config);
  config.site_import = 0;
  config.write_bytecode = 0;
  config.install_signal_handlers = 0;
  config.pathconfig_warnings = 0;
  // Same order of sets in every helper, so that a conversation renders the same way twice. What
  // colliding keys could cost is bounded by the time limit.
  config.use_hash_seed = 1;
  config.hash_seed = 0;
  config.module_search_paths_set = 1;
  bool ok = SetString(&config, &config.program_name, L"/usr/bin/python3") &&
            SetString(&config, &config.executable, L"/usr/bin/python3") &&
            SetString(&config, &config.home, L"/usr");
  for (const wchar_t* path :
       {TANDEM_PYTHON_STDLIB, TANDEM_PYTHON_DYNLOAD, TANDEM_PYTHON_PACKAGES}) {
    ok = ok && PyStatus_Exception(PyWideStringList_Append(&config.module_search_paths, path)) == 0;
  }
  ok = ok && PyStatus_Exception(Py_InitializeFromConfig(&config)) == 0;
  PyConfig_Clear(&config);
  return ok;
}

bool RunScript() {
  PyObject* code = Py_CompileString(kTemplateHelperScript, "template_helper.py", Py_file_input);
  if (code == nullptr) return false;
  PyObject* main = PyImport_AddModule("__main__");  // borrowed
  if (main == nullptr) return false;
  PyObject* globals = PyModule_GetDict(main);  // borrowed
  PyObject* result = PyEval_EvalCode(code, globals, globals);
  return result != nullptr;
}

}  // namespace

bool IsTemplateHelper(int argc, char** argv) {
  return argc == 2 && std::string_view(argv[1]) == kTemplateHelperFlag;
}

int TemplateHelperMain() {
  // The parent's thread that owns the helper lives as long as it wants one.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  if (!StartInterpreter()) {
    std::fprintf(stderr, "template helper: the Python interpreter does not start\n");
    std::_Exit(1);
  }
  const bool ok = RunScript();
  if (!ok) PyErr_Print();
  // Without the interpreter's own end: it has nothing to save and much to free.
  std::_Exit(ok ? 0 : 1);
}

}  // namespace tandem::gateway
