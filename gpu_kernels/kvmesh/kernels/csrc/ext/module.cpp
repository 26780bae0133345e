// kvmesh.kernels._native: small hot calls from Python, where a ctypes call would cost more than the work.
//
// Each source file of this extension defines a null-terminated method table or an init function; a new file is added
// to kTables or kInitializers.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern "C" PyMethodDef kvmesh_event_methods[];
extern "C" PyMethodDef kvmesh_hashing_methods[];
extern "C" PyMethodDef kvmesh_json_methods[];
extern "C" PyMethodDef kvmesh_msgpack_methods[];
extern "C" PyMethodDef kvmesh_page_ids_methods[];
extern "C" PyMethodDef kvmesh_shared_word_methods[];
extern "C" PyMethodDef kvmesh_tree_methods[];
extern "C" int kvmesh_calls_init(PyObject* module);
extern "C" int kvmesh_event_records_init(PyObject* module);
extern "C" int kvmesh_key_index_init(PyObject* module);
extern "C" int kvmesh_page_states_init(PyObject* module);
extern "C" int kvmesh_prefix_index_init(PyObject* module);

namespace {

PyMethodDef* const kTables[] = {kvmesh_event_methods,   kvmesh_hashing_methods,     kvmesh_json_methods,
                                kvmesh_msgpack_methods, kvmesh_page_ids_methods,    kvmesh_shared_word_methods,
                                kvmesh_tree_methods};
int (*const kInitializers[])(PyObject*) = {kvmesh_calls_init, kvmesh_event_records_init, kvmesh_key_index_init,
                                          kvmesh_page_states_init, kvmesh_prefix_index_init};

int fill_module(PyObject* module) {
  for (PyMethodDef* table : kTables)
    if (PyModule_AddFunctions(module, table) != 0) return -1;
  for (auto initialize : kInitializers)
    if (initialize(module) != 0) return -1;
  return 0;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(fill_module)},
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvmesh.kernels._native", "Native helpers of KVMesh.", 0, nullptr, slots,
    nullptr,               nullptr,                  nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
