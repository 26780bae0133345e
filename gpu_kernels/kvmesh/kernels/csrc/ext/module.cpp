// kvmesh.kernels._native: small hot calls from Python, where a ctypes call would cost more than the work.
//
// Each source file of this extension defines one null-terminated method table; adding a file means adding its table
// to kTables.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern "C" PyMethodDef kvmesh_hashing_methods[];

namespace {

PyMethodDef* const kTables[] = {kvmesh_hashing_methods};

int add_functions(PyObject* module) {
  for (PyMethodDef* table : kTables)
    if (PyModule_AddFunctions(module, table) != 0) return -1;
  return 0;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(add_functions)},
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvmesh.kernels._native", "Native helpers of KVMesh.", 0, nullptr, slots,
    nullptr,               nullptr,                  nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
