# xopt/_sycl: the host side of the kernels on SYCL devices. It is compiled by the same g++ as all else, against the
# headers and libraries of the package intel-sycl-rt; its device sources are compiled at run time, by that package.

# Where the package has put its files, as Python knows; another oneAPI can be named by XOPT_SYCL_ROOT.
set(XOPT_SYCL_ROOT "" CACHE PATH "A folder with include/sycl/sycl.hpp and lib/libsycl.so; empty: of package intel-sycl-rt")
if(NOT XOPT_SYCL_ROOT)
  set(find_sycl [[
import importlib.metadata, pathlib
for file in importlib.metadata.files("intel-sycl-rt"):
    if str(file).endswith("include/sycl/sycl.hpp"):
        print(pathlib.Path(file.locate()).resolve().parents[2])
]])
  execute_process(COMMAND "${Python_EXECUTABLE}" -c "${find_sycl}" OUTPUT_VARIABLE sycl_root ERROR_QUIET
                  RESULT_VARIABLE sycl_status OUTPUT_STRIP_TRAILING_WHITESPACE)
else()
  set(sycl_root "${XOPT_SYCL_ROOT}")
endif()
if(NOT EXISTS "${sycl_root}/include/sycl/sycl.hpp")
  message(FATAL_ERROR "XOPT_SYCL needs the SYCL headers and runtime: make xpu, or pip install "
                      "intel-sycl-rt==2026.0.0 intel-opencl-rt, or set XOPT_SYCL_ROOT")
endif()

# ---- The device sources, as text in the library -----------------------------------------------------------------------

file(GLOB device_sources RELATIVE "${PROJECT_SOURCE_DIR}/csrc" CONFIGURE_DEPENDS
     "${PROJECT_SOURCE_DIR}/csrc/sycl/device/*")
# What device sources include of the host's, over however many steps: headers without torch and containers.
list(APPEND device_sources kernels/attention.h kernels/batch_norm.h kernels/combine.h kernels/concat.h kernels/conv.h
     kernels/convert.h kernels/gemm.h kernels/group_norm.h kernels/norm.h kernels/packed.h kernels/pointwise.h
     kernels/pool.h kernels/rotary.h kernels/softmax.h kernels/upsample.h kernels/weight_only.h runtime/tuning.h
     tiles/layout.h tiles/types.h)
set(source_table "// Made by cmake/sycl.cmake of the files named in it.\n#include \"sycl/sources.h\"\n\n")
string(APPEND source_table "namespace xopt::sycl_device {\n\nconst Source kSources[] = {\n")
foreach(source IN LISTS device_sources)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/${source}")
  file(READ "${PROJECT_SOURCE_DIR}/csrc/${source}" text)
  string(APPEND source_table "{\"${source}\", R\"xopt_source(${text})xopt_source\"},\n")
endforeach()
string(APPEND source_table "};\nconst int kSourceCount = sizeof(kSources) / sizeof(kSources[0]);\n\n}\n")
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/sycl_sources.cpp" CONTENT "@source_table@" @ONLY)

# ---- The module --------------------------------------------------------------------------------------------------------

xopt_glob(sycl_sources "${PROJECT_SOURCE_DIR}/csrc/sycl/*.cpp")
pybind11_add_module(xopt_sycl MODULE NO_EXTRAS ${sycl_sources} "${PROJECT_BINARY_DIR}/sycl_sources.cpp")
set_target_properties(xopt_sycl PROPERTIES OUTPUT_NAME _sycl)
target_compile_definitions(xopt_sycl PRIVATE SYCL_DISABLE_FSYCL_SYCLHPP_WARNING CL_TARGET_OPENCL_VERSION=300)
target_include_directories(xopt_sycl SYSTEM PRIVATE "${sycl_root}/include")
# No path to libsycl is kept: xopt.sycl loads it first, from where the package lies on the user's machine.
target_link_libraries(xopt_sycl PRIVATE xopt_core "${sycl_root}/lib/libsycl.so")
install(TARGETS xopt_sycl LIBRARY DESTINATION xopt)
