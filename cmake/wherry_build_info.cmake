# Writes what this build is into generated/support/build_info.hpp (at configure time), and the git
# commit into generated/support/git_commit.cpp (at every build, rewritten only when it changes).

set(wherry_generated_dir "${CMAKE_CURRENT_BINARY_DIR}/generated")

function(wherry_write_build_info)
  string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
  set(flags ${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${type}} ${wherry_compile_options})
  if(WHERRY_SANITIZE)
    list(APPEND flags -fsanitize=${WHERRY_SANITIZE})
  endif()
  list(JOIN flags " " WHERRY_FLAGS)

  get_property(options GLOBAL PROPERTY wherry_options)
  set(WHERRY_OPTION_ROWS "")
  foreach(name IN LISTS options)
    foreach(field IN ITEMS asked found gives reason)
      get_property(${field} GLOBAL PROPERTY wherry_option_${name}_${field})
    endforeach()
    if(found)
      set(enabled true)
    else()
      set(enabled false)
    endif()
    foreach(field IN ITEMS gives reason)
      string(REPLACE "\\" "\\\\" ${field} "${${field}}")
      string(REPLACE "\"" "\\\"" ${field} "${${field}}")
    endforeach()
    string(APPEND WHERRY_OPTION_ROWS
           "    {\"${name}\", ${enabled}, \"${asked}\", \"${gives}\",\n     \"${reason}\"},\n")
  endforeach()
  configure_file("${PROJECT_SOURCE_DIR}/src/support/build_info.hpp.in"
                 "${wherry_generated_dir}/support/build_info.hpp" @ONLY)
endfunction()
wherry_write_build_info()

set(wherry_git_commit_cpp "${wherry_generated_dir}/support/git_commit.cpp")
add_custom_target(wherry_git_commit
  COMMAND "${CMAKE_COMMAND}" "-DSOURCE_DIR=${PROJECT_SOURCE_DIR}"
          "-DOUTPUT=${wherry_git_commit_cpp}" -P "${PROJECT_SOURCE_DIR}/cmake/git_commit.cmake"
  BYPRODUCTS "${wherry_git_commit_cpp}"
  COMMENT "Looking at the git commit" VERBATIM)
