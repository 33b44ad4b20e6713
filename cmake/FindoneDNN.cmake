# Finds oneDNN by its header and library: oneDNN::oneDNN, oneDNN_FOUND, oneDNN_VERSION.
# Not through its own dnnl-config.cmake: Debian's stops with an error where OpenCL's headers are
# missing, which nothing here includes.

find_path(oneDNN_INCLUDE_DIR oneapi/dnnl/dnnl.hpp)
find_library(oneDNN_LIBRARY dnnl)
mark_as_advanced(oneDNN_INCLUDE_DIR oneDNN_LIBRARY)
if(oneDNN_INCLUDE_DIR AND EXISTS "${oneDNN_INCLUDE_DIR}/oneapi/dnnl/dnnl_version.h")
  file(STRINGS "${oneDNN_INCLUDE_DIR}/oneapi/dnnl/dnnl_version.h" oneDNN_lines REGEX "_VERSION_")
  foreach(part IN ITEMS MAJOR MINOR PATCH)
    string(REGEX MATCH "DNNL_VERSION_${part} +([0-9]+)" oneDNN_match "${oneDNN_lines}")
    list(APPEND oneDNN_parts "${CMAKE_MATCH_1}")
  endforeach()
  list(JOIN oneDNN_parts "." oneDNN_VERSION)
  unset(oneDNN_parts)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(oneDNN REQUIRED_VARS oneDNN_LIBRARY oneDNN_INCLUDE_DIR
                                         VERSION_VAR oneDNN_VERSION)
if(oneDNN_FOUND AND NOT TARGET oneDNN::oneDNN)
  add_library(oneDNN::oneDNN UNKNOWN IMPORTED)
  set_target_properties(oneDNN::oneDNN PROPERTIES
    IMPORTED_LOCATION "${oneDNN_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${oneDNN_INCLUDE_DIR}")
endif()
